"""Peers: as many parameters as ours, called alike."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.measures import TOLERANCE
from benchmarks.peers import NATIVES, PEERS, count_parameters, find_peer, match_parameters, ours, reference
from benchmarks.shapes import SHAPES, draw_batches
from tests.benchmarks.tiny import CPU, TINY, run


@pytest.mark.parametrize("name", ("decoder", "encoder", "seq2seq", "gpt2-124m"))
def test_all_have_as_many_parameters(name: str) -> None:
    shape = SHAPES[name]
    with torch.device("meta"):
        target = count_parameters(NATIVES[reference(shape.family)].make(shape))
        for peer in PEERS.values():
            if shape.family in peer.families:
                own = match_parameters(peer.make, shape, target)
                assert count_parameters(peer.make(own)) == pytest.approx(target, rel=0.02)


def test_ours_has_the_size_of_the_peer_it_is_like() -> None:
    for family, shape in TINY.items():
        like = reference(family)
        model = ours(shape, like)
        assert model.config.model_type == f"scratch_{family}"
        # A bias that Marian keeps as a constant is a parameter of ours.
        assert count_parameters(model) - count_parameters(NATIVES[like].make(shape)) in (0, shape.vocabulary)


CHECKOUT = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F

@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.table = nn.Linear(config.vocab_size, config.vocab_size, bias=False)

    def forward(self, idx, targets=None):
        logits = self.table(F.one_hot(idx, self.config.vocab_size).float())
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
"""


def test_a_checkout_and_a_function_are_called_as_the_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text(CHECKOUT)
    (tmp_path / "some_peer.py").write_text("from benchmarks.peers import NATIVES\nbuild = NATIVES['llama'].make\n")
    monkeypatch.syspath_prepend(tmp_path)
    shape = TINY["decoder"]
    (batch,) = draw_batches(shape, 1, CPU)
    model: Any = find_peer(f"nanogpt={tmp_path}").make(shape)
    assert model.gpt.config.block_size == shape.length and model.gpt.config.n_embd == shape.width
    logits = model.gpt.table.weight.T[batch["input_ids"][:, :-1]]
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    torch.testing.assert_close(model(**batch).loss, expected)
    (result,) = run(
        tmp_path / "out", "train", "--shape", "tiny-decoder", "--peer", "some_peer:build", f"nanogpt={tmp_path}"
    )
    assert result["contenders"]["some_peer:build"]["difference"] < TOLERANCE
    assert result["ratios"].keys() == {"some_peer:build", f"nanogpt={tmp_path}"}
