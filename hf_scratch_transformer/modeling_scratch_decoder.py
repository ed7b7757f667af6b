"""The decoder: a language model whose tokens see those before them (GPT, Radford et al., 2018; Llama), and its heads.

Shapes: B batch, T length, D width, V vocabulary.
"""

from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast, ModelOutput
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .cache_scratch import preallocate
from .configuration_scratch import ScratchDecoderConfig
from .generation_scratch import ScratchGenerationMixin
from .heads_scratch import (
    LossKwargs,
    ScratchForQuestionAnswering,
    ScratchForSequenceClassification,
    ScratchForTokenClassification,
    ScratchLanguageModel,
    check_token_labels,
    take_loss_kwargs,
)
from .stack_scratch import ScratchKwargs, ScratchStack, is_padding_mask
from .unpadding_scratch import trim_after_last_target


class ScratchDecoderModel(ScratchStack):
    """A stack of blocks that see one side."""

    config: ScratchDecoderConfig
    preallocate = staticmethod(preallocate)

    def __init__(self, config: ScratchDecoderConfig):
        super().__init__(config, config.vocab_size, is_causal=True)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[ScratchKwargs],
    ) -> BaseModelOutputWithPast:
        """
        Args:
            input_ids: the new tokens (B, T), or `inputs_embeds` (B, T, D) in their stead.
            attention_mask: 1 for real tokens, 0 for padding, of those in the cache and the new ones (B, past + T).
            position_ids: (B, T). Where they start again, and neither mask nor tokens in a cache are given, a new
                document starts: packed documents do not see each other.
            past_key_values: keys and values of earlier tokens.
            use_cache: return such a cache.
        """
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        hidden_states = self.encode(
            input_ids, inputs_embeds, attention_mask, position_ids, past_key_values=past_key_values, **kwargs
        )
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, past_key_values=past_key_values)


class ScratchDecoderForCausalLM(ScratchLanguageModel, ScratchGenerationMixin):
    """The decoder with a head that guesses the next token."""

    config: ScratchDecoderConfig
    _auto_class = "AutoModelForCausalLM"
    output_type = CausalLMOutputWithPast

    def __init__(self, config: ScratchDecoderConfig):
        super().__init__(config, ScratchDecoderModel(config), config.vocab_size)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        if self.config.value_head_dim != self.config.head_dim:
            raise ValueError(
                f"value_head_dim={self.config.value_head_dim} differs from head_dim={self.config.head_dim}: the cache "
                "of continuous batching holds keys and values of one width; use generate"
            )
        for name, is_there in {
            f"position_embedding_type={self.config.position_embedding_type!r}": self.model.position_bias,
            f"attn_logit_softcapping={self.config.attn_logit_softcapping}": self.config.attn_logit_softcapping,
        }.items():
            if is_there:
                raise ValueError(f"{name}: the kernels of continuous batching leave it out; use generate")
        return super().init_continuous_batching(*args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Unpack[LossKwargs],
    ) -> CausalLMOutputWithPast:
        """
        Args:
            labels: the tokens themselves (B, T), shifted by one here, or `shift_labels`, by the caller; -100 where
                there is nothing to predict, as after padding. The rest as `ScratchDecoderModel`, `LossKwargs`.
            logits_to_keep: logits for that many last positions, or for these positions, only; 0 for all.

        Returns:
            `loss` in nats per target, `logits` (B, T, V), `past_key_values`.
        """
        loss_kwargs = take_loss_kwargs(kwargs)
        targets = kwargs.pop("shift_labels", None)
        if labels is not None or targets is not None:
            for given in (labels, targets):
                check_token_labels(given, input_ids if inputs_embeds is None else inputs_embeds)
            if targets is None:
                targets = F.pad(labels[:, 1:].long(), (0, 1), value=-100)  # unsigned ones have no -100
            if past_key_values is None:
                use_cache = bool(use_cache)  # nothing is written after a known text
                if loss_kwargs.get("loss_only") and attention_mask is None and position_ids is None:
                    attention_mask = trim_after_last_target(targets)
        outputs = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache=use_cache, **kwargs
        )
        return self.predict(outputs, targets, attention_mask, logits_to_keep, **loss_kwargs)


class ScratchDecoderForSequenceClassification(ScratchForSequenceClassification):
    """Reads the label off the last real token, the only one that has seen all the others."""

    config: ScratchDecoderConfig
    backbone = ScratchDecoderModel

    def select(self, outputs: ModelOutput, attention_mask: Any, input_ids: Tensor | None) -> Tensor:
        hidden_states = outputs.last_hidden_state
        batch, length = hidden_states.shape[:2]
        if is_padding_mask(attention_mask):
            real = attention_mask[:, -length:].bool()  # without the prefix that a cache may hold
        elif input_ids is not None and self.config.pad_token_id is not None:
            real = input_ids != self.config.pad_token_id
        else:
            return hidden_states[:, -1]
        last = (torch.arange(length, device=real.device) * real).argmax(-1)
        return hidden_states[torch.arange(batch, device=real.device), last]  # (B, D)


class ScratchDecoderForTokenClassification(ScratchForTokenClassification):
    config: ScratchDecoderConfig
    backbone = ScratchDecoderModel


class ScratchDecoderForQuestionAnswering(ScratchForQuestionAnswering):
    config: ScratchDecoderConfig
    backbone = ScratchDecoderModel
