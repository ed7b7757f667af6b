"""The models of others, by name, each with as many parameters as ours at the same shape."""

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)
from transformers.utils import is_flash_attn_2_available

from hf_scratch_transformer.conversion import convert_from
from hf_scratch_transformer.tokenization import Family
from training.objectives import IGNORED

from .shapes import BOS, EOS, PAD, Shape, unknown

OURS = "ours"


class Peer(NamedTuple):
    """A model of others. `make` takes a shape; what it returns is called as transformers' models are: to train, with
    `input_ids`, `attention_mask` where there is padding, and `labels`, for a `loss`; `generate`; to embed, its
    `base_model`, for a `last_hidden_state`."""

    make: Callable[[Shape], nn.Module]
    families: tuple[str, ...]
    kinds: tuple[str, ...] = ("train",)
    is_native: bool = False
    is_sized: bool = True  # whether it heeds `feed_forward`


# Names under which configurations keep the dropout of embeddings and sub-layers.
RESIDUAL_DROPOUTS = ("dropout", "hidden_dropout_prob", "resid_pdrop", "embd_pdrop")


@dataclass(frozen=True)
class Native:
    """A model of transformers."""

    family: Family
    model_type: str
    widths: tuple[str, ...]  # the fields that hold the width of the feed-forward layers
    fields: Mapping[str, Any] = field(default_factory=dict)
    kinds: tuple[str, ...] = ("train", "generate", "calls", "embed")
    attention: str | None = None  # the backend; by default what transformers takes

    def make(self, shape: Shape, dropout: float = 0.0, **fields: Any) -> PreTrainedModel:
        """A new model of a shape; `fields` of its configuration win."""
        stacks = ("encoder", "decoder") if self.family == "seq2seq" else ("num",)
        layers = {"num": "num_hidden_layers", "encoder": "encoder_layers", "decoder": "decoder_layers"}
        values = {
            "vocab_size": shape.vocabulary,
            "hidden_size": shape.width,
            "max_position_embeddings": shape.length,
            "pad_token_id": PAD,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            **{layers[stack]: shape.layers for stack in stacks},
            **{f"{stack}_attention_heads": shape.heads for stack in stacks},
            **dict.fromkeys(self.widths, shape.feed_forward),
        }
        config = AutoConfig.for_model(self.model_type, **{**values, **self.fields, **fields})
        for name, value in config.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, dropout if name in RESIDUAL_DROPOUTS else 0.0)
        return AUTO_MODELS[self.family].from_config(config, attn_implementation=self.attention)


AUTO_MODELS: dict[str, Any] = {
    "decoder": AutoModelForCausalLM,
    "encoder": AutoModelForMaskedLM,
    "seq2seq": AutoModelForSeq2SeqLM,
}
# Both sides of a pair speak one language here, and every output is as long as is asked for.
PAIRS = {"decoder_start_token_id": BOS, "forced_bos_token_id": None, "forced_eos_token_id": None}
FFN = ("encoder_ffn_dim", "decoder_ffn_dim")
CLS = {"cls_token_id": BOS, "sep_token_id": EOS}
# What a user would train with Trainer.
NATIVE_OF = {"seq2seq": "marian", "encoder": "bert", "decoder": "llama"}
# The first of a family is the one whose architecture ours takes, unless another is asked for.
NATIVES = {
    "llama": Native("decoder", "llama", ("intermediate_size",), {"tie_word_embeddings": True}),
    "gpt2": Native("decoder", "gpt2", ("n_inner",)),
    "distilbert": Native("encoder", "distilbert", ("hidden_dim",)),
    "bert": Native("encoder", "bert", ("intermediate_size",)),
    "modernbert": Native("encoder", "modernbert", ("intermediate_size",), CLS),
    "modernbert-sparse": Native(
        "encoder", "modernbert", ("intermediate_size",), CLS | {"sparse_prediction": True}, ("train",)
    ),
    "modernbert-flash": Native(
        "encoder", "modernbert", ("intermediate_size",), CLS, ("train", "embed"), "flash_attention_2"
    ),
    "marian": Native("seq2seq", "marian", FFN, PAIRS | {"activation_function": "swish", "scale_embedding": True}),
    "bart": Native("seq2seq", "bart", FFN, PAIRS),
}


class TorchTransformer(nn.Module):
    """`torch.nn.Transformer`, or its encoder, as its documentation uses it, with what it takes to train it: token and
    position tables, a tied head, a loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.is_causal = shape.family == "decoder"
        sizes = (shape.width, shape.heads)
        options: dict[str, Any] = {"dropout": 0.0, "activation": F.gelu, "batch_first": True}
        if shape.family == "seq2seq":
            self.core: nn.Module = nn.Transformer(*sizes, shape.layers, shape.layers, shape.feed_forward, **options)
        else:
            layer = nn.TransformerEncoderLayer(*sizes, shape.feed_forward, **options)
            self.core = nn.TransformerEncoder(layer, shape.layers)
        self.tokens = nn.Embedding(shape.vocabulary, shape.width, padding_idx=PAD)
        self.positions = nn.Embedding(shape.length, shape.width)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)  # as everybody's; the default, 1, makes for a loss of hundreds
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def embed(self, ids: Tensor) -> Tensor:  # (B, T) -> (B, T, D)
        return self.tokens(ids) + self.positions.weight[: ids.shape[1]]

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> SimpleNamespace:
        padding = None if attention_mask is None else attention_mask == 0
        causal_mask = torch.ones(labels.shape[1], labels.shape[1], dtype=torch.bool, device=labels.device).triu(1)
        if isinstance(self.core, nn.Transformer):
            targets = F.pad(labels.masked_fill(labels == IGNORED, PAD)[:, :-1], (1, 0), value=BOS)
            hidden_states = self.core(
                self.embed(input_ids),
                self.embed(targets),
                tgt_mask=causal_mask,
                src_key_padding_mask=padding,
                memory_key_padding_mask=padding,
                tgt_is_causal=True,
            )
        else:
            mask = causal_mask if self.is_causal else None
            hidden_states = self.core(self.embed(input_ids), mask, padding, is_causal=self.is_causal)
        logits = self.head(hidden_states)
        if self.is_causal:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


class NanoGPT(nn.Module):
    """The model of a checkout of nanoGPT, called as the others are."""

    def __init__(self, module: ModuleType, shape: Shape) -> None:
        super().__init__()
        config = module.GPTConfig(
            block_size=shape.length,
            vocab_size=shape.vocabulary,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_embd=shape.width,
            dropout=0.0,
        )
        self.gpt = module.GPT(config)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> SimpleNamespace:
        # Padding comes last, where nobody looks.
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        _, loss = self.gpt(input_ids, targets.masked_fill(targets == IGNORED, -1))  # its ignore_index
        return SimpleNamespace(loss=loss)


# With FlashAttention where it is installed.
PEERS = {
    name: Peer(native.make, (native.family,), native.kinds, True)
    for name, native in NATIVES.items()
    if native.attention is None or is_flash_attn_2_available()
}
PEERS["torch"] = Peer(TorchTransformer, get_args(Family))


def find_peer(name: str) -> Peer:
    """A peer by its name, `nanogpt=PATH` of a checkout, or `module:function`, which is given a `Shape`.

    Raises ValueError for what is not there, with the nearest name.
    """
    if name in PEERS:
        return PEERS[name]
    prefix, _, checkout = name.partition("=")
    if prefix == "nanogpt":
        path = Path(checkout).expanduser() / "model.py"
        spec = importlib.util.spec_from_file_location("nanogpt_model", path)
        if not checkout or not path.is_file() or spec is None or spec.loader is None:
            raise ValueError(f"peer {name!r}: there is no {path}; give nanogpt=PATH of a checkout")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return Peer(functools.partial(NanoGPT, module), ("decoder",), is_sized=False)
    module_name, _, function = name.partition(":")
    if not function:
        raise ValueError(unknown("peer", name, [*PEERS, "nanogpt=PATH", "module:function"]))
    try:
        make = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"peer {name!r}: {error}") from error
    return Peer(make, get_args(Family), ("train", "generate", "calls", "embed"), is_sized=False)


def reference(family: str) -> str:
    """The peer whose architecture ours takes, and whose number of parameters all others are given."""
    return next(name for name, native in NATIVES.items() if native.family == family)


def ours(shape: Shape, like: str) -> PreTrainedModel:
    """Our model in the architecture of a native one."""
    return convert_from(NATIVES[like].make(shape))


def count_parameters(model: nn.Module) -> int:
    """How many parameters are trained; a shared one counts once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def match_parameters(make: Callable[[Shape], nn.Module], shape: Shape, target: int) -> Shape:
    """The shape whose feed-forward width brings the parameters nearest to `target`. They grow linearly with it."""
    width = shape.feed_forward
    with torch.device("meta"):
        one, two = (count_parameters(make(dataclasses.replace(shape, feed_forward=k * width))) for k in (1, 2))
    unit = 64 if width % 64 == 0 else 1  # as round as it was: GPUs multiply round sizes faster
    best = round((width + (target - one) * width / (two - one)) / unit) * unit
    return dataclasses.replace(shape, feed_forward=max(best, unit))
