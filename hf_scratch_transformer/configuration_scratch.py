"""The three configurations: one set of fields describes an encoder, a decoder and an encoder-decoder.

Every field carries the name transformers uses for it. Values that can be derived are derived once, combinations that
cannot work are refused once, here: no layer checks its configuration again.
"""

import copy
import dataclasses
import difflib
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.generation import GenerationConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .norms_scratch import LayerNorm1P, RMSNorm1P
from .ops_scratch import RMSNorm

# What there is to choose from. These tables are the only place where a choice is listed: the configuration checks
# against them and the layers build from them.


class Activation(NamedTuple):
    function: Callable[[Tensor], Tensor]
    is_gated: bool = False  # multiplied by a second projection (Shazeer, 2020)


class NormPlacement(NamedTuple):
    """Where norms stand: `x = after(x + dropout(inside(sublayer(before(x)))))`, and once more after the last block."""

    before: bool = False
    inside: bool = False
    after: bool = False
    final: bool = False
    is_parallel: bool = False  # attention and feed-forward layer read the same x (Wang & Komatsuzaki, 2021)
    is_shared: bool = False  # which one norm has normalised for both


class Positions(NamedTuple):
    """How the place of a token enters: added to its embedding, from a trained table or from sinusoids; by turning
    queries and keys; by what is added to scores."""

    is_added: bool = False
    has_table: bool = False  # whose length is a hard limit
    in_halves: bool = False  # all sines before all cosines
    is_inclusive: bool = False  # the slowest of them has a wavelength of 10000 · 2π, rather than almost
    is_rotary: bool = False
    is_bias: bool = False


_gelu_tanh = partial(F.gelu, approximate="tanh")
# All of transformers but those that are trained; torch's own kernels first, which do the same faster.
_functions: dict[str, Callable[[Tensor], Tensor]] = {
    **{"relu": F.relu, "gelu": F.gelu, "silu": F.silu},  # the last is also called swish (Marian)
    **{"gelu_new": _gelu_tanh, "gelu_pytorch_tanh": _gelu_tanh},  # GPT-2, Gemma
}
_others = ACT2FN.keys() - _functions.keys() - {"swish", "prelu", "xielu"}
_functions |= {name: ACT2FN[name].forward for name in sorted(_others)}
ACTIVATIONS = {
    "swiglu": Activation(F.silu, is_gated=True),  # Llama
    **{name: Activation(function) for name, function in _functions.items()},
    **{f"gated-{name}": Activation(each, is_gated=True) for name, each in _functions.items() if name != "silu"},  # T5
}
NORMS: dict[str, type[nn.Module]] = {
    "layer_norm": nn.LayerNorm,
    "rms_norm": RMSNorm,  # Zhang & Sennrich, 2019
    "layer_norm_1p": LayerNorm1P,  # Nemotron
    "rms_norm_1p": RMSNorm1P,  # Gemma
}
NORM_PLACEMENTS = {
    "pre": NormPlacement(before=True, final=True),  # Xiong et al., 2020
    "post": NormPlacement(after=True),  # the paper
    "reordered": NormPlacement(inside=True, final=True),  # OLMo 2
    "sandwich": NormPlacement(before=True, inside=True, final=True),  # Ding et al., 2021; Gemma 2
    "parallel": NormPlacement(before=True, final=True, is_parallel=True),  # GPT-NeoX
    "parallel_shared": NormPlacement(before=True, final=True, is_parallel=True, is_shared=True),  # GPT-J, Phi
}
LAYER_TYPES = ("full_attention", "sliding_attention")
POSITIONS = {
    "sinusoidal": Positions(is_added=True),  # the paper
    "sinusoidal_halves": Positions(is_added=True, in_halves=True),  # Marian
    "sinusoidal_tensor2tensor": Positions(is_added=True, in_halves=True, is_inclusive=True),  # M2M-100
    "learned": Positions(is_added=True, has_table=True),  # BERT, GPT-2
    "learned_relative_bias": Positions(is_added=True, has_table=True, is_bias=True),  # MPNet
    "rotary": Positions(is_rotary=True),  # Su et al., 2021
    "relative_bias": Positions(is_bias=True),  # T5
    "none": Positions(),
}
POOLERS: dict[str | None, Callable | None] = {None: None, "tanh": torch.tanh, "relu": F.relu, "gelu": F.gelu}
CHOICES = {  # the fields that hold a choice
    "hidden_act": tuple(ACTIVATIONS),
    "position_embedding_type": tuple(POSITIONS),
    "norm_type": tuple(NORMS),
    "norm_position": tuple(NORM_PLACEMENTS),
    # Glorot & Bengio (2010) for every matrix; N(0, initializer_range); or the latter, but with each sub-layer's last
    # matrix at zero: a pre-norm block starts as the identity; norm upon norm of a row of zeros would have no gradient.
    "initialization": ("xavier_uniform", "normal", "normal_zero_output"),
}
SIZES = (
    *("vocab_size", "decoder_vocab_size", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "value_head_dim"),
    *("max_position_embeddings", "num_hidden_layers", "encoder_layers", "decoder_layers", "sliding_window"),
    "mup_base_width",
)
FACTORS = (
    *("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
    *("attn_logit_softcapping", "final_logit_softcapping"),
)
PROBABILITIES = ("dropout", "attention_dropout", "activation_dropout", "classifier_dropout")
RANGES: dict[str, tuple[tuple[str, ...], Callable[[float], bool]]] = {  # the fields that hold a number
    "at least 1": (SIZES, lambda value: value >= 1),
    "at least 0": (("position_offset", "type_vocab_size"), lambda value: value >= 0),
    "above 0": (("layer_norm_eps", "initializer_range", *FACTORS), lambda value: 0 < value < float("inf")),
    "at least 0 and below 1": (PROBABILITIES, lambda value: 0 <= value < 1),
}

# Keys that are no field of ours but that transformers itself gives to a configuration or stores in config.json.
ECOSYSTEM_KEYS = {
    *("attn_implementation", "auto_map", "custom_pipelines", "distributed_config", "experts_implementation"),
    *("finetuning_task", "model_type", "name_or_path", "num_labels", "output_attentions", "partial_rotary_factor"),
    *("per_layer_config", "quantization_config", "rope_scaling", "rope_theta", "tie_last_hidden_states", "torch_dtype"),
    *("transformers_weights", "trust_remote_code", "use_return_dict"),
}


def _auto_map(family: str, *heads: str, **others: str) -> dict[str, str]:
    """The complete `auto_map` of a family: {Auto class: file.class}, so that a checkpoint saved from any head opens
    with every Auto class (transformers would list the saved one alone). The first head is the pre-trained one."""
    models = {f"AutoModel{head}": head for head in heads} | others
    models |= {"AutoModel": "Model", "AutoModelForPreTraining": next(iter(models.values()))}
    file = f"modeling_scratch_{family.lower()}"
    return {
        "AutoConfig": f"configuration_scratch.Scratch{family}Config",
        **{auto_class: f"{file}.Scratch{family}{name}" for auto_class, name in models.items()},
    }


def _tensor_parallel_plan(*attentions: str) -> dict[str, str]:
    styles = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
    styles |= dict.fromkeys(("q_norm", "k_norm"), "replicated_with_grad_allreduce")
    return {
        "embeddings.word_embeddings": "embedding_rowwise",
        **{f"layers.*.{each}.{name}": style for each in attentions for name, style in styles.items()},
        **{f"layers.*.mlp.{name}": "colwise" for name in ("gate_proj", "up_proj")},
        "layers.*.mlp.down_proj": "rowwise",
    }


def _within(part: str, plan: dict[str, str]) -> dict[str, str]:
    return {f"{part}.{name}": style for name, style in plan.items()}


def positions_that(flag: str) -> str:
    return " or ".join(repr(name) for name, each in POSITIONS.items() if getattr(each, flag))


def rotations(rope: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The parameters of rotary positions, for each kind of block where they differ."""
    return [rope[kind] for kind in LAYER_TYPES if kind in rope] or [rope] if rope else []


def rotary_dim(head_dim: int, rope: dict[str, Any]) -> int:
    """How many entries of a head are turned; the others know no positions (GPT-NeoX)."""
    return int(head_dim * rope.get("partial_rotary_factor", 1.0))


@strict
class ScratchConfig(PreTrainedConfig):
    """What the three families have in common: each field, its default, and its symbol in "Attention Is All You Need".
    One `ValueError` names every field that is wrong, its value, and what would be right."""

    # Marks the class as custom code, for which `save_pretrained` copies the source files beside the weights.
    _auto_class = "AutoConfig"
    _auto_map: ClassVar[dict[str, str]] = {}
    attribute_map = dict.fromkeys(("layer_norm_epsilon", "rms_norm_eps"), "layer_norm_eps")  # GPT-2's, Llama's names
    base_model_tp_plan = _tensor_parallel_plan("self_attn")
    base_model_fsdp_plan = {
        **dict.fromkeys(("embeddings.word_embeddings", "layers.*"), "free_full_weight"),
        "norm": "keep_full_weight",
    }

    vocab_size: int = 32000  # V; of the source side where the two sides of a translator differ
    hidden_size: int = 512  # d_m, the width of the residual stream
    intermediate_size: int = 2048  # d_ff, the width inside the feed-forward layer
    num_attention_heads: int = 8  # h, of queries
    # Of keys and values; fewer than of queries is grouped-query attention (Ainslie et al., 2023). Default: as many.
    num_key_value_heads: int | None = None
    head_dim: int | None = None  # d_k, the width of queries and keys per head. Default: hidden_size / heads
    value_head_dim: int | None = None  # d_v. Default: head_dim
    hidden_act: str = "gelu"  # of the feed-forward layer, in ACTIVATIONS
    position_embedding_type: str = "rotary"  # in POSITIONS
    max_position_embeddings: int = 512  # the longest sequence meant; a hard limit only for learned positions
    # Blocks that are "sliding_attention" (in LAYER_TYPES), not "full_attention", see so many tokens, one itself among
    # them; in an encoder so many to either side. `rope_parameters` may have an entry for each kind (Gemma 3).
    sliding_window: int | None = None
    position_offset: int = 0  # of the first position, where they are added to embeddings (BART and RoBERTa have 2)
    rope_parameters: dict | None = None  # of rotary ones; types but "default" stretch the context of a trained model
    relative_attention_num_buckets: int = 32  # of distances that a relative bias tells apart
    relative_attention_max_distance: int = 128  # beyond which all are one
    share_relative_attention_bias: bool = True  # among all blocks of a stack; else each has its own (UMT5)
    norm_type: str = "rms_norm"  # in NORMS
    norm_position: str = "pre"  # in NORM_PLACEMENTS
    layer_norm_eps: float = 1e-6  # of every norm
    norm_bias: bool = True  # of layer norms
    first_norm: bool = True  # before attention in the first block, where that of the embeddings may do (ModernBERT)
    use_qk_norm: bool = False  # RMSNorm over queries and keys of each head (Henry et al., 2020; Qwen3)
    qk_norm_across_heads: bool = False  # over those of all heads together (OLMo 2)
    scale_embedding: bool = False  # token embeddings times sqrt(hidden_size), as in the paper
    embedding_multiplier: float | int = 1.0  # of token embeddings, besides (Granite)
    attention_multiplier: float | int | None = None  # of the scores. Default: 1 / sqrt(head_dim)
    residual_multiplier: float | int = 1.0  # of what each sub-layer adds
    logits_scaling: float | int = 1.0  # logits are divided by it
    attn_logit_softcapping: float | int | None = None  # c: scores are c tanh(score / c) (Gemma 2)
    final_logit_softcapping: float | int | None = None  # the same of logits
    embedding_norm: bool = False  # one more norm, over the sum of the embeddings (BERT, BART)
    attention_bias: bool = False  # in the four projections of attention
    attention_output_bias: bool | None = None  # in the last of them, where it differs (Qwen2)
    mlp_bias: bool = False  # in the projections of the feed-forward layer
    lm_head_bias: bool = False  # for each token of the vocabulary (BERT, Marian)
    classifier_bias: bool = True  # Llama's head for whole sequences has none
    tie_word_embeddings: bool = True  # the language-model head is the token table of its own side
    initialization: str = "normal"  # in CHOICES
    initializer_range: float = 0.02  # standard deviation of the normal ones
    # hidden_size of a narrower model, by whose trials learning rate and initialisation were chosen (muP, Yang et al.,
    # 2022): of a wider one `logits_scaling` is the ratio r, if nothing else is said, matrices in the blocks start
    # smaller by sqrt(r), and AdamW's steps on them are smaller by r. head_dim is to stay the same.
    mup_base_width: int | None = None
    dropout: float | int = 0.0  # on the embeddings and on the output of every sub-layer
    attention_dropout: float | int = 0.0  # on the attention weights
    activation_dropout: float | int = 0.0  # on the hidden units of the feed-forward layer
    classifier_dropout: float | int | None = None  # before the classification heads. Default: dropout
    pad_token_id: int | None = 0  # whose row of the table starts as zero, and only a tied head trains
    train_padding_embedding: bool = False  # it is a row as others: T5's targets start with it, GPT-2's documents may
    bos_token_id: int | None = 1  # that a text begins with
    eos_token_id: int | list[int] | None = 2  # after which nothing more is generated

    def __post_init__(self, **kwargs: Any) -> None:
        self._refuse_unknown_keys(kwargs)
        is_rotary = POSITIONS.get(self.position_embedding_type, Positions()).is_rotary
        if self.rope_parameters and not is_rotary:
            raise ValueError(
                f"rope_parameters={self.rope_parameters} needs position_embedding_type='rotary', "
                f"got position_embedding_type={self.position_embedding_type!r}"
            )
        super().__post_init__(**kwargs)
        if not is_rotary:
            self.rope_parameters = None  # the base class fills in a theta for everybody
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None and self.num_attention_heads > 0 and self.hidden_size % self.num_attention_heads == 0:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.value_head_dim is None:
            self.value_head_dim = self.head_dim
        if self.logits_scaling == 1.0:
            self.logits_scaling = self.width_ratio
        # Always the plain names: a map written by an older transformers may point back to the repository it came from,
        # on which a fine-tuned copy would depend although it carries the same files.
        self.auto_map = dict(self._auto_map)
        # Called here as well as by `validate()`: the latter wraps the ValueError in a class that is not one.
        self.validate_architecture()

    @property
    def width_ratio(self) -> float:
        """r of `mup_base_width`."""
        return self.hidden_size / self.mup_base_width if self.mup_base_width else 1.0

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Saves all code that `auto_map` names too: a configuration may be saved without a model."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        for file in {Path(__file__).with_name(f"{each.split('.')[0]}.py") for each in self._auto_map.values()}:
            for each in [file, *get_relative_import_files(file)] if file.exists() else []:
                shutil.copy(each, save_directory)
        super().save_pretrained(save_directory, *args, **kwargs)

    def _refuse_unknown_keys(self, kwargs: dict[str, Any]) -> None:
        fields = sorted(field.name for field in dataclasses.fields(self))
        known = ECOSYSTEM_KEYS | set(self.attribute_map) | set(GenerationConfig._get_default_generation_params())
        # Programs leave notes of their own in a saved config.json; there, only a near-miss of a field is refused.
        is_saved_file = self.transformers_version is not None
        errors = []
        for key in kwargs.keys() - known:
            nearest = difflib.get_close_matches(key, fields, n=1, cutoff=0.82)
            if nearest or not (is_saved_file or key.startswith("_")):
                hint = f"did you mean {nearest[0]!r}?" if nearest else f"fields are {', '.join(fields)}"
                errors.append(f"{key}={kwargs[key]!r} is not a field of {type(self).__name__}: {hint}")
        if errors:
            raise ValueError("; ".join(sorted(errors)))

    def validate_architecture(self) -> None:
        """Refuse impossible values and combinations, all of them in one `ValueError`."""
        if errors := list(self._errors()):
            raise ValueError(f"{type(self).__name__} cannot work: " + "; ".join(errors))

    def _errors(self) -> Iterator[str]:
        for name, choices in (CHOICES | {"pooler_act": tuple(POOLERS)}).items():
            if (choice := getattr(self, name, None)) not in choices:
                yield f"{name}={choice!r} must be one of {', '.join(map(repr, choices))}"
        for wanted, (names, is_within) in RANGES.items():
            for name in names:
                if (value := getattr(self, name, None)) is not None and not is_within(value):
                    yield f"{name}={value} must be {wanted}"
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if self.head_dim is None:
            yield (
                f"num_attention_heads={heads} does not divide hidden_size={self.hidden_size}: "
                "choose one that does, or give head_dim"
            )
        if groups > 0 and heads % groups:
            yield f"num_key_value_heads={groups} must divide num_attention_heads={heads}"
        norms = NORM_PLACEMENTS.get(self.norm_position, NormPlacement())
        if not self.first_norm and not norms.before:
            yield f"first_norm=False needs norms before attention, which norm_position={self.norm_position!r} has not"
        if norms.after and self.initialization == "normal_zero_output" and self.transformers_version is None:
            yield f"norm_position={self.norm_position!r} does not go with initialization='normal_zero_output'"
        positions = POSITIONS.get(kind := self.position_embedding_type, Positions())
        if self.position_offset and not positions.is_added:
            these = positions_that("is_added")
            yield f"position_offset={self.position_offset} needs position_embedding_type={these}, got {kind!r}"
        if not self.share_relative_attention_bias and not positions.is_bias:
            these = positions_that("is_bias")
            yield f"share_relative_attention_bias=False needs position_embedding_type={these}, got {kind!r}"
        if positions.is_inclusive and (self.hidden_size % 2 or self.hidden_size < 4):
            yield f"hidden_size={self.hidden_size} must be even and at least 4 for position_embedding_type={kind!r}"
        buckets, far = self.relative_attention_num_buckets, self.relative_attention_max_distance
        if buckets < 4 or far <= buckets // 2:
            yield (
                f"relative_attention_num_buckets={buckets} must be at least 4, and "
                f"relative_attention_max_distance={far} more than half of them"
            )
        if self.qk_norm_across_heads and not self.use_qk_norm:
            yield "qk_norm_across_heads=True needs use_qk_norm=True"
        if not self.norm_bias and not self.norm_type.startswith("layer_norm"):
            yield f"norm_bias=False needs norm_type='layer_norm', got {self.norm_type!r}, which has none"
        for rope in rotations(self.rope_parameters):
            if positions.is_rotary and self.head_dim is not None and rotary_dim(self.head_dim, rope) % 2:
                part = f" times partial_rotary_factor={factor}" if (factor := rope.get("partial_rotary_factor")) else ""
                yield f"head_dim={self.head_dim}{part} must be even for position_embedding_type='rotary'"
            if (rope_type := rope.get("rope_type", "default")) not in ("default", *ROPE_INIT_FUNCTIONS):
                yield f"rope_parameters={rope}: {rope_type=} must be 'default' or in {set(ROPE_INIT_FUNCTIONS)}"
            if not 0 < rope.get("partial_rotary_factor", 1) <= 1:
                yield f"rope_parameters={rope}: partial_rotary_factor must be above 0 and at most 1"
            numbers = [value for value in rope.values() if isinstance(value, float | int)]
            if not rope.get("rope_theta", 1) > 0 or any(not abs(number) < 2**63 for number in numbers):
                yield f"rope_parameters={rope}: rope_theta must be above 0, numbers finite and below 2**63"
        target = getattr(self, "decoder_vocab_size", None) or self.vocab_size
        limits = dict.fromkeys(("bos_token_id", "eos_token_id", "decoder_start_token_id"), target)
        for name, limit in (limits | {"pad_token_id": min(self.vocab_size, target)}).items():
            tokens = getattr(self, name, None)
            for token in tokens if isinstance(tokens, list) else [tokens]:
                if token is not None and not 0 <= token < limit:
                    yield f"{name}={tokens} must lie within the vocabulary, 0 to {limit - 1}"

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        kinds = self.attribute_map.get(name, name).removeprefix("num_hidden_").replace("layers", "layer_types")
        # Blocks of the usual kind stay so when there are more or fewer of them.
        is_depth = kinds.endswith("layer_types") and isinstance(value, int)
        if is_depth and {*(getattr(self, kinds, None) or ())} == {"full_attention"}:
            super().__setattr__(kinds, ["full_attention"] * value)

    def _errors_of_kinds(self, depths: dict[str, str]) -> Iterator[str]:
        """`depths`: fields with an entry for each block, and the fields that say how many there are."""
        kinds: set[str] = set()
        for name, depth in depths.items():
            if (each := getattr(self, name)) is not None and len(each) != getattr(self, depth):
                yield f"{name}={each} must have {depth}={getattr(self, depth)} entries"
            if name == "no_rope_layers" and not set(each or ()) <= {0, 1}:
                yield f"no_rope_layers={each} must be 0 or 1 for each layer"
            if name.endswith("layer_types"):
                kinds |= set(each)
                if unknown := set(each) - set(LAYER_TYPES):
                    known = ", ".join(map(repr, LAYER_TYPES))
                    yield f"{name}={each}: {', '.join(map(repr, unknown))} must be in {known}"
                if "sliding_attention" in each and self.sliding_window is None:
                    yield f"{name}={each}: 'sliding_attention' needs sliding_window, in tokens"
                is_cached = name == "decoder_layer_types" or (name == "layer_types" and hasattr(self, "use_cache"))
                if "sliding_attention" in each and self.sliding_window == 1 and is_cached:
                    yield "sliding_window=1 must be at least 2 in a decoder, whose cache keeps one token less"
        rope = self.rope_parameters or {}
        nested = [kind for kind in LAYER_TYPES if kind in rope]
        if nested and not {*kinds, *rope} <= {*nested}:
            yield f"rope_parameters={rope} must have one entry for each of layer_types={sorted(kinds)}"


CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


@strict
class ScratchStackConfig(ScratchConfig):
    """What an encoder and a decoder have in common, but not a translator: one stack of blocks."""

    num_hidden_layers: int = 6  # N
    layer_types: list[str] | None = None  # of each block. Default: "full_attention"
    no_rope_layers: list[int] | None = None  # for each block 1, or 0 where it knows no positions (SmolLM3's name)

    def __post_init__(self, **kwargs: Any) -> None:
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if all(self.no_rope_layers or ()):  # one way to say it
            self.no_rope_layers = None
        super().__post_init__(**kwargs)

    def _errors(self) -> Iterator[str]:
        yield from super()._errors()
        yield from self._errors_of_kinds(dict.fromkeys(("layer_types", "no_rope_layers"), "num_hidden_layers"))
        if self.no_rope_layers is not None and not POSITIONS[self.position_embedding_type].is_rotary:
            yield f"no_rope_layers needs position_embedding_type='rotary', got {self.position_embedding_type!r}"


@strict
class ScratchEncoderConfig(ScratchStackConfig):
    """A bidirectional encoder, as BERT and DistilBERT are."""

    model_type = "scratch_encoder"
    _auto_map = _auto_map("Encoder", "ForMaskedLM", *CLASSIFIERS, "ForMultipleChoice", AutoModelForTextEncoding="Model")

    # Kinds of token that `token_type_ids` tell apart, as BERT's first and second sentence; 0: those ids are ignored.
    type_vocab_size: int = 0
    # In POOLERS: `pooler_output`, by which whole texts and choices are classified, is a dense layer and this activation
    # over the state of the first token (BERT has "tanh", DistilBERT's classifier "relu", ELECTRA's "gelu").
    pooler_act: str | None = None
    lm_head_transform: bool = False  # a dense layer, `hidden_act` and a norm before the masked-LM head (BERT)
    lm_head_transform_bias: bool = True  # in its dense layer (ModernBERT has none)


@strict
class ScratchDecoderConfig(ScratchStackConfig):
    """A decoder-only language model, as GPT-2 and Llama are."""

    model_type = "scratch_decoder"
    keys_to_ignore_at_inference = ["past_key_values"]
    base_model_pp_plan = {
        "embeddings": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }
    _auto_map = _auto_map("Decoder", "ForCausalLM", *CLASSIFIERS)

    use_cache: bool = True  # by default, keys and values of earlier tokens are kept


@strict
class ScratchSeq2SeqConfig(ScratchConfig):
    """An encoder-decoder, as the paper's translator and Marian are."""

    model_type = "scratch_seq2seq"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = ScratchConfig.attribute_map | {"num_hidden_layers": "encoder_layers"}
    base_model_tp_plan = {
        **_within("encoder", ScratchConfig.base_model_tp_plan),
        **_within("decoder", _tensor_parallel_plan("self_attn", "cross_attn")),
    }
    base_model_fsdp_plan = {
        **_within("encoder", ScratchConfig.base_model_fsdp_plan),
        **_within("decoder", ScratchConfig.base_model_fsdp_plan),
    }
    _auto_map = _auto_map("Seq2Seq", AutoModelForSeq2SeqLM="ForConditionalGeneration")

    encoder_layers: int = 6  # N of the encoder; `generate` reads it by this name
    decoder_layers: int = 6  # N of the decoder
    encoder_layer_types: list[str] | None = None  # of each block. Default: "full_attention"
    decoder_layer_types: list[str] | None = None  # likewise
    decoder_embedding_norm_first: bool = False  # `embedding_norm` before positions are added (Blenderbot-small)
    decoder_vocab_size: int | None = None  # of the target. Default: vocab_size
    share_encoder_decoder_embeddings: bool = True  # one table for both sides; if tied, the head is that table too
    decoder_start_token_id: int | None = None  # of every target. Default: bos_token_id, or else pad_token_id
    wrap_labels: bool = False  # in training a target starts with the last of its labels, as mBART's with its language
    is_encoder_decoder: bool = True
    use_cache: bool = True  # by default, keys and values of earlier tokens are kept

    def __post_init__(self, **kwargs: Any) -> None:
        for side in ("encoder", "decoder"):
            if getattr(self, f"{side}_layer_types") is None:
                setattr(self, f"{side}_layer_types", ["full_attention"] * getattr(self, f"{side}_layers"))
        if self.decoder_vocab_size is None:
            self.decoder_vocab_size = self.vocab_size
        if self.decoder_start_token_id is None:
            self.decoder_start_token_id = self.bos_token_id if self.bos_token_id is not None else self.pad_token_id
        super().__post_init__(**kwargs)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """A side's fields under plain names, by shallow copies: `generate` asks seven times. Asked without a side, it
        means the vocabulary it generates from: the target's."""
        config, side = copy.copy(self), "decoder_" if decoder else "encoder_"
        if decoder == encoder and self.decoder_vocab_size in (None, self.vocab_size):  # of a side there is one only
            return self
        if decoder == encoder:
            config.vocab_size = self.decoder_vocab_size
            return config
        for name in [name for name in vars(self) if name.startswith(side)]:
            value = getattr(config, name)
            delattr(config, name)
            setattr(config, {"layers": "num_hidden_layers"}.get(plain := name.removeprefix(side), plain), value)
        return config

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "vocab_size" and self.share_encoder_decoder_embeddings:  # one table: resizing it resizes both sides
            self.decoder_vocab_size = value

    def _errors(self) -> Iterator[str]:
        yield from super()._errors()
        yield from self._errors_of_kinds({f"{side}_layer_types": f"{side}_layers" for side in ("encoder", "decoder")})
        if self.decoder_embedding_norm_first and not self.embedding_norm:
            yield "decoder_embedding_norm_first=True needs embedding_norm=True"
        if self.share_encoder_decoder_embeddings and self.decoder_vocab_size != self.vocab_size:
            yield (
                f"share_encoder_decoder_embeddings=True needs decoder_vocab_size={self.decoder_vocab_size} to equal "
                f"vocab_size={self.vocab_size}"
            )
        if NORM_PLACEMENTS.get(self.norm_position, NormPlacement()).is_parallel:
            yield f"norm_position={self.norm_position!r} leaves no place for attention to the source"
        if self.decoder_start_token_id is None:
            yield "decoder_start_token_id=None: give it, or bos_token_id, or pad_token_id"
