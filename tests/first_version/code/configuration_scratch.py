"""The three configurations: one set of fields describes an encoder, a decoder and an encoder-decoder.

Every field carries the name transformers uses for it. Values that can be derived are derived once, combinations that
cannot work are refused once, here: no layer checks its configuration again.
"""

import copy
import dataclasses
import difflib
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.generation import GenerationConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# What each field with a closed set of values accepts.
CHOICES = {
    "hidden_act": ("relu", "gelu", "gelu_new", "silu", "swiglu"),
    "position_embedding_type": ("sinusoidal", "sinusoidal_halves", "learned", "rotary", "none"),
    "norm_type": ("layer_norm", "rms_norm"),
    "norm_position": ("pre", "post"),
    "initialization": ("xavier_uniform", "normal", "normal_zero_output"),
}
SIZES = (
    "vocab_size",
    "decoder_vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "value_head_dim",
    "max_position_embeddings",
    "num_hidden_layers",
    "encoder_layers",
    "decoder_layers",
)
PROBABILITIES = ("dropout", "attention_dropout", "activation_dropout", "classifier_dropout")

# Keys that are no field of ours but that transformers itself gives to a configuration or stores in config.json.
ECOSYSTEM_KEYS = frozenset(
    [
        "attn_implementation",
        "auto_map",
        "custom_pipelines",
        "distributed_config",
        "experts_implementation",
        "finetuning_task",
        "model_type",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "partial_rotary_factor",
        "per_layer_config",
        "quantization_config",
        "rope_scaling",
        "rope_theta",
        "tie_last_hidden_states",
        "torch_dtype",
        "transformers_weights",
        "trust_remote_code",
        "use_return_dict",
    ]
)


def _auto_map(family: str, **heads: str) -> dict[str, str]:
    """The complete `auto_map` of a family: {Auto class: file.class}, so that a checkpoint saved from any head opens
    with every Auto class (transformers itself would list the saved class alone)."""
    models = {
        auto_class: f"{'modeling' if suffix == 'Model' else 'heads'}_scratch.Scratch{family}{suffix}"
        for auto_class, suffix in {"AutoModel": "Model", **heads}.items()
    }
    return {"AutoConfig": f"configuration_scratch.Scratch{family}Config", **models}


@strict
class ScratchConfig(PreTrainedConfig):
    r"""
    What the three families have in common. Symbols of "Attention Is All You Need" in parentheses.

    Args:
        vocab_size: number of tokens (V); of the source side where the two sides of a translator differ.
        hidden_size: width of the residual stream (d_m).
        intermediate_size: width inside the feed-forward layer (d_ff).
        num_attention_heads: query heads (h).
        num_key_value_heads: key and value heads; must divide `num_attention_heads`. Fewer than that is grouped-query
            attention (Ainslie et al., 2023). Default: `num_attention_heads`.
        head_dim: width of queries and keys per head (d_k). Default: `hidden_size / num_attention_heads`.
        value_head_dim: width of values per head (d_v). Default: `head_dim`.
        hidden_act: `"relu"`, `"gelu"`, `"gelu_new"` (its approximation by tanh, as GPT-2), `"silu"` (swish, as Marian),
            or `"swiglu"` for the gated unit of Shazeer (2020).
        position_embedding_type: `"sinusoidal"` (the paper's table, any length), `"sinusoidal_halves"` (the same with
            all sines before all cosines, as Marian), `"learned"` (BERT, GPT-2; at most `max_position_embeddings`),
            `"rotary"` (Su et al., 2021; any length) or `"none"`.
        max_position_embeddings: longest sequence the model is meant for; a hard limit only for learned positions.
        position_offset: rows of the learned table before that of the first position (BART and RoBERTa have 2).
        rope_parameters: `{"rope_theta": 10000.0, "rope_type": "default"}`; for rotary positions only. The other types
            of transformers stretch the context of a trained model.
        norm_type: `"layer_norm"` or `"rms_norm"` (Zhang & Sennrich, 2019).
        norm_position: `"post"`, after the residual sum as in the paper, or `"pre"`, before each sub-layer, with one
            more norm after the last layer (Xiong et al., 2020).
        layer_norm_eps: epsilon of every norm.
        use_qk_norm: RMSNorm over each head's queries and keys before the product (Henry et al., 2020; as Qwen3).
        scale_embedding: multiply token embeddings by sqrt(hidden_size), as in the paper.
        embedding_norm: one more norm, over the sum of the embeddings (BERT, BART).
        attention_bias: biases in the four projections of attention.
        attention_output_bias: that of the last projection, where it differs (Qwen2). Default: `attention_bias`.
        mlp_bias: biases in the feed-forward layer.
        lm_head_bias: a bias for each token of the vocabulary (BERT, Marian).
        classifier_bias: biases in the classification heads; Llama's of whole sequences has none.
        tie_word_embeddings: the language-model head is the token table of its own side.
        initialization: `"xavier_uniform"` (Glorot & Bengio, 2010) for every matrix, `"normal"` with standard deviation
            `initializer_range`, or `"normal_zero_output"`: the same, but each sub-layer's last matrix starts at zero,
            so that every pre-norm block starts as the identity.
        initializer_range: standard deviation of the normal initialisations.
        dropout: on the embeddings and on the output of every sub-layer.
        attention_dropout: on the attention weights.
        activation_dropout: on the hidden units of the feed-forward layer.
        classifier_dropout: before the classification heads. Default: `dropout`.
        pad_token_id, bos_token_id, eos_token_id: special tokens; the table's row of `pad_token_id` stays zero.

    Raises:
        ValueError: one message that names every field that is wrong, its value, and what would be right.
    """

    # Marks the class as custom code, for which `save_pretrained` copies the source files beside the weights.
    _auto_class = "AutoConfig"
    _auto_map: ClassVar[dict[str, str]] = {}
    attribute_map = dict.fromkeys(("layer_norm_epsilon", "rms_norm_eps"), "layer_norm_eps")  # GPT-2's, Llama's names
    base_model_fsdp_plan = {
        "embeddings.word_embeddings": "free_full_weight",
        "layers.*": "free_full_weight",
        "norm": "keep_full_weight",
    }

    vocab_size: int = 32000
    hidden_size: int = 512
    intermediate_size: int = 2048
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    value_head_dim: int | None = None
    hidden_act: str = "gelu"
    position_embedding_type: str = "rotary"
    max_position_embeddings: int = 512
    position_offset: int = 0
    rope_parameters: dict | None = None
    norm_type: str = "rms_norm"
    norm_position: str = "pre"
    layer_norm_eps: float = 1e-6
    use_qk_norm: bool = False
    scale_embedding: bool = False
    embedding_norm: bool = False
    attention_bias: bool = False
    attention_output_bias: bool | None = None
    mlp_bias: bool = False
    lm_head_bias: bool = False
    classifier_bias: bool = True
    tie_word_embeddings: bool = True
    initialization: str = "normal"
    initializer_range: float = 0.02
    dropout: float | int = 0.0
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    classifier_dropout: float | int | None = None
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    def __post_init__(self, **kwargs: Any) -> None:
        self._refuse_unknown_keys(kwargs)
        rotary = self.position_embedding_type == "rotary"
        if self.rope_parameters and not rotary:
            raise ValueError(
                f"rope_parameters={self.rope_parameters} needs position_embedding_type='rotary', "
                f"got position_embedding_type={self.position_embedding_type!r}"
            )
        super().__post_init__(**kwargs)
        if not rotary:
            self.rope_parameters = None  # the base class fills in a theta for everybody
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None and self.num_attention_heads > 0 and self.hidden_size % self.num_attention_heads == 0:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.value_head_dim is None:
            self.value_head_dim = self.head_dim
        # Always the plain names: a map written by an older transformers may point back to the repository it came from,
        # on which a fine-tuned copy would depend although it carries the same files.
        self.auto_map = dict(self._auto_map)
        # Called here as well as by `validate()`: the latter wraps the ValueError in a class that is not one.
        self.validate_architecture()

    def _refuse_unknown_keys(self, kwargs: dict[str, Any]) -> None:
        fields = sorted(field.name for field in dataclasses.fields(self))
        known = ECOSYSTEM_KEYS | set(self.attribute_map) | set(GenerationConfig._get_default_generation_params())
        # Programs leave notes of their own in a saved config.json; there, only a near-miss of a field is refused.
        is_saved_file = self.transformers_version is not None
        complaints = []
        for key in kwargs.keys() - known:
            nearest = difflib.get_close_matches(key, fields, n=1, cutoff=0.82)
            if nearest or not (is_saved_file or key.startswith("_")):
                hint = f"did you mean {nearest[0]!r}?" if nearest else f"fields are {', '.join(fields)}"
                complaints.append(f"{key}={kwargs[key]!r} is not a field of {type(self).__name__}: {hint}")
        if complaints:
            raise ValueError("; ".join(sorted(complaints)))

    def validate_architecture(self) -> None:
        """Refuse impossible values and combinations, all of them in one `ValueError`."""
        if complaints := self._complaints():
            raise ValueError(f"{type(self).__name__} cannot work: " + "; ".join(complaints))

    def _complaints(self) -> list[str]:
        wrong = [
            f"{name}={getattr(self, name)!r} must be one of {', '.join(map(repr, values))}"
            for name, values in CHOICES.items()
            if getattr(self, name) not in values
        ]
        sizes = {name: getattr(self, name) for name in SIZES if getattr(self, name, None) is not None}
        wrong += [f"{name}={size} must be at least 1" for name, size in sizes.items() if size < 1]
        if self.position_offset < 0:
            wrong.append(f"position_offset={self.position_offset} must be at least 0")
        if self.position_offset and self.position_embedding_type != "learned":
            wrong.append(
                f"position_offset={self.position_offset} needs position_embedding_type='learned', "
                f"got {self.position_embedding_type!r}"
            )
        rates = {name: getattr(self, name) for name in PROBABILITIES if getattr(self, name) is not None}
        wrong += [f"{name}={rate} must be at least 0 and below 1" for name, rate in rates.items() if not 0 <= rate < 1]
        wrong += [
            f"{name}={getattr(self, name)} must be above 0"
            for name in ("layer_norm_eps", "initializer_range")
            if not getattr(self, name) > 0
        ]
        if self.head_dim is None:
            wrong.append(
                f"num_attention_heads={self.num_attention_heads} does not divide hidden_size={self.hidden_size}: "
                "choose one that does, or give head_dim"
            )
        elif self.position_embedding_type == "rotary" and self.head_dim % 2:
            wrong.append(f"head_dim={self.head_dim} must be even for position_embedding_type='rotary'")
        groups, heads = self.num_key_value_heads, self.num_attention_heads
        if groups > 0 and heads % groups:
            wrong.append(f"num_key_value_heads={groups} must divide num_attention_heads={heads}")
        rope = self.rope_parameters or {}
        if (kind := rope.get("rope_type", "default")) not in ("default", *ROPE_INIT_FUNCTIONS):
            wrong.append(
                f"rope_parameters={rope}: rope_type={kind!r} must be 'default' or in {set(ROPE_INIT_FUNCTIONS)}"
            )
        if not rope.get("rope_theta", 1.0) > 0:
            wrong.append(f"rope_parameters={rope}: rope_theta must be above 0")
        for name, limit in self._token_limits().items():
            tokens = getattr(self, name)
            for token in tokens if isinstance(tokens, list) else [tokens]:
                if token is not None and not 0 <= token < limit:
                    wrong.append(f"{name}={tokens} must lie within the vocabulary, 0 to {limit - 1}")
        return wrong

    def _token_limits(self) -> dict[str, int]:
        """The vocabulary size that each special token must stay below."""
        return dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), self.vocab_size)


def _tensor_parallel_plan(*stacks: str) -> dict[str, str]:
    styles = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
    norms = dict.fromkeys(("q_norm", "k_norm"), "replicated_with_grad_allreduce")
    plan = {f"{stack}embeddings.word_embeddings": "embedding_rowwise" for stack in stacks}
    for stack in stacks:
        attentions = ("self_attn", "cross_attn") if stack == "decoder." else ("self_attn",)
        for attention in attentions:
            plan |= {f"{stack}layers.*.{attention}.{name}": style for name, style in (styles | norms).items()}
        plan |= {f"{stack}layers.*.mlp.{name}": "colwise" for name in ("gate_proj", "up_proj")}
        plan[f"{stack}layers.*.mlp.down_proj"] = "rowwise"
    return plan


@strict
class ScratchEncoderConfig(ScratchConfig):
    """A bidirectional encoder, as BERT and DistilBERT are. `num_hidden_layers` is its depth (N).

    Args:
        type_vocab_size: kinds of token that `token_type_ids` tell apart, such as BERT's first and second sentence; 0
            for none, in which case those ids are ignored.
        pooler_act: one vector for a whole text, from a dense layer and this activation over the state of its first
            token: `"tanh"` (BERT) or `"relu"` (DistilBERT's classifier). The backbone returns it as `pooler_output`,
            and whole texts and choices are classified by it. `None`: no such layer.
        lm_head_transform: a dense layer, `hidden_act` and a norm before the masked-LM head (BERT).
    """

    model_type = "scratch_encoder"
    base_model_tp_plan = _tensor_parallel_plan("")
    _auto_map = _auto_map(
        "Encoder",
        AutoModelForPreTraining="ForMaskedLM",
        AutoModelForMaskedLM="ForMaskedLM",
        AutoModelForSequenceClassification="ForSequenceClassification",
        AutoModelForTokenClassification="ForTokenClassification",
        AutoModelForQuestionAnswering="ForQuestionAnswering",
        AutoModelForMultipleChoice="ForMultipleChoice",
        AutoModelForTextEncoding="Model",
    )

    num_hidden_layers: int = 6
    type_vocab_size: int = 0
    pooler_act: str | None = None
    lm_head_transform: bool = False

    def _complaints(self) -> list[str]:
        wrong = super()._complaints()
        if self.type_vocab_size < 0:
            wrong.append(f"type_vocab_size={self.type_vocab_size} must be at least 0")
        if self.pooler_act not in (None, "tanh", "relu"):
            wrong.append(f"pooler_act={self.pooler_act!r} must be one of None, 'tanh', 'relu'")
        return wrong


@strict
class ScratchDecoderConfig(ScratchConfig):
    """A decoder-only language model, as GPT-2 and Llama are. `num_hidden_layers` is its depth (N); `use_cache` keeps
    keys and values of earlier tokens by default."""

    model_type = "scratch_decoder"
    keys_to_ignore_at_inference = ["past_key_values"]
    base_model_tp_plan = _tensor_parallel_plan("")
    base_model_pp_plan = {
        "embeddings": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }
    _auto_map = _auto_map(
        "Decoder",
        AutoModelForPreTraining="ForCausalLM",
        AutoModelForCausalLM="ForCausalLM",
        AutoModelForSequenceClassification="ForSequenceClassification",
        AutoModelForTokenClassification="ForTokenClassification",
        AutoModelForQuestionAnswering="ForQuestionAnswering",
    )

    num_hidden_layers: int = 6
    use_cache: bool = True


@strict
class ScratchSeq2SeqConfig(ScratchConfig):
    """An encoder-decoder, as the paper's translator and Marian are.

    Args:
        encoder_layers, decoder_layers: depths of the two stacks (N). `generate` of transformers reads these names.
        decoder_vocab_size: target vocabulary. Default: `vocab_size`.
        share_encoder_decoder_embeddings: both sides look tokens up in one table, which takes
            `decoder_vocab_size == vocab_size`. With `tie_word_embeddings` the head is that table too.
        decoder_start_token_id: first token of every target. Default: `bos_token_id`, or else `pad_token_id`.
    """

    model_type = "scratch_seq2seq"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = ScratchConfig.attribute_map | {"num_hidden_layers": "encoder_layers"}
    base_model_tp_plan = _tensor_parallel_plan("encoder.", "decoder.")
    base_model_fsdp_plan = {
        f"{stack}.{part}": plan
        for stack in ("encoder", "decoder")
        for part, plan in ScratchConfig.base_model_fsdp_plan.items()
    }
    _auto_map = _auto_map(
        "Seq2Seq",
        AutoModelForPreTraining="ForConditionalGeneration",
        AutoModelForSeq2SeqLM="ForConditionalGeneration",
    )

    encoder_layers: int = 6
    decoder_layers: int = 6
    decoder_vocab_size: int | None = None
    share_encoder_decoder_embeddings: bool = True
    decoder_start_token_id: int | None = None
    is_encoder_decoder: bool = True
    use_cache: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if self.decoder_vocab_size is None:
            self.decoder_vocab_size = self.vocab_size
        if self.decoder_start_token_id is None:
            self.decoder_start_token_id = self.bos_token_id if self.bos_token_id is not None else self.pad_token_id
        super().__post_init__(**kwargs)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """Asked without a side, `generate` means the vocabulary it generates from: the target's."""
        if decoder != encoder or self.decoder_vocab_size == self.vocab_size:
            return super().get_text_config(decoder, encoder)
        config = copy.copy(self)
        config.vocab_size = self.decoder_vocab_size
        return config

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "vocab_size" and self.share_encoder_decoder_embeddings:  # one table: resizing it resizes both sides
            self.decoder_vocab_size = value

    def _complaints(self) -> list[str]:
        wrong = super()._complaints()
        if self.share_encoder_decoder_embeddings and self.decoder_vocab_size != self.vocab_size:
            wrong.append(
                f"share_encoder_decoder_embeddings=True needs decoder_vocab_size={self.decoder_vocab_size} to equal "
                f"vocab_size={self.vocab_size}"
            )
        if self.decoder_start_token_id is None:
            wrong.append("decoder_start_token_id=None: give it, or bos_token_id, or pad_token_id")
        return wrong

    def _token_limits(self) -> dict[str, int]:
        target = getattr(self, "decoder_vocab_size", None) or self.vocab_size
        return {
            "pad_token_id": min(self.vocab_size, target),
            **dict.fromkeys(("bos_token_id", "eos_token_id", "decoder_start_token_id"), target),
        }


__all__ = ["ScratchConfig", "ScratchEncoderConfig", "ScratchDecoderConfig", "ScratchSeq2SeqConfig"]
