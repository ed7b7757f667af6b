"""Norms that torch does not have."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class OnePlus(nn.Module):
    """A norm whose weight is what its scale has beyond 1: it starts at 0, to which weight decay pulls it."""

    weight: nn.Parameter

    def scale(self) -> Tensor:  # half precision has few numbers about 1
        return 1 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


class RMSNorm1P(OnePlus, nn.RMSNorm):
    """That of Gemma (Gemma Team, 2024)."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.scale()
        return F.rms_norm(x.to(weight.dtype), self.normalized_shape, weight, self.eps).to(self.weight.dtype)


class LayerNorm1P(OnePlus, nn.LayerNorm):
    """That of Nemotron (Parmar et al., 2024)."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.scale()
        bias = None if self.bias is None else self.bias.to(weight.dtype)
        return F.layer_norm(x.to(weight.dtype), self.normalized_shape, weight, bias, self.eps).to(self.weight.dtype)
