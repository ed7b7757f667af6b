"""What tables of several families have in common."""

from collections.abc import Mapping
from typing import Any

import transformers

from .. import configuration_scratch
from .tables import Field, OneOf, Row, only, same

NATIVE = {*transformers.__all__}  # all classes there are, none of which is imported for it
TOKENS = same("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")
_UNGATED = [name for name, activation in configuration_scratch.ACTIVATIONS.items() if not activation.is_gated]
ACTIVATIONS = {**{name: name for name in _UNGATED}, "swish": "silu"}
GATED = {name: "swiglu" if name == "silu" else f"gated-{name}" for name in _UNGATED}
UNGATED = {gated: name for name, gated in GATED.items()}
# Heads share the width of the model equally, and there are as many keys and values as queries.
EQUAL_HEADS: Mapping[str, Any] = {
    "num_key_value_heads": lambda config: config.num_attention_heads,
    "head_dim": lambda config: config.hidden_size // config.num_attention_heads,
    "value_head_dim": lambda config: config.head_dim,
    "attention_output_bias": lambda config: config.attention_bias,
}
WITH_BIASES: Mapping[str, Any] = {
    **EQUAL_HEADS,
    "norm_type": "layer_norm",
    "attention_bias": True,
    "mlp_bias": True,
}
# The first positions, up to the one that is the padding token's id, are for padding.
PADDING_FIRST = Field("pad_token_id", "position_offset", lambda pad, _: pad + 1, lambda offset, _: offset - 1)
# Of those that cannot say that it is that of the other layers, which ours says by None.
SOME_CLASSIFIER_DROPOUT = Field(
    "classifier_dropout",
    "classifier_dropout",
    back=lambda dropout, ours: ours["dropout"] if dropout is None else dropout,
)
QKV = tuple(f"layers.{{layer}}.self_attn.{name}_proj" for name in ("q", "k", "v"))
USE_BIAS = tuple(Field("use_bias", name) for name in ("attention_bias", "mlp_bias"))
NOT_QUANTIZED = {"quantization_config": only(None)}

CLASSIFIER = (Row("classifier", "classifier"),)
DENSE_CLASSIFIER = (Row("classifier.dense", "model.pooler.dense"), Row("classifier.out_proj", "classifier"))
QUESTIONS = (Row("qa_outputs", "qa_outputs"),)
CHOICES = (Row("classifier", "choice_scorer"),)
# Decoders classify whole texts without a bias; a head that ours is given later shall do so too. Their other heads have
# one, which is zero where ours has none.
NO_BIAS = {"classifier_bias": False}
ANY_BIAS = {"classifier_bias": OneOf([True, False])}
