"""`make architectures`: writes docs/ARCHITECTURES.md from the tables of the conversion, and measures what it says.

Each architecture is built three times, small, with other options each time and every number drawn at random, as the
tests of the conversion build it; each of its heads becomes ours.
"""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from hf_scratch_transformer.configuration_scratch import SIZES as SIZE_FIELDS
from hf_scratch_transformer.configuration_scratch import rotations
from hf_scratch_transformer.conversion import convert_from
from hf_scratch_transformer.conversion.comparison import compare
from hf_scratch_transformer.conversion.families import FAMILIES
from hf_scratch_transformer.conversion.tables import TRAINING_ONLY, Family

# By name, since tests are not typed.
MODELS: Any = importlib.import_module("tests.test_conversion")
PAGE = Path(__file__).with_name("ARCHITECTURES.md")
NOT_SAID = (
    {field.name for field in dataclasses.fields(PreTrainedConfig)} | TRAINING_ONLY | {*SIZE_FIELDS} - {"sliding_window"}
)
NOT_SAID |= {"layer_norm_eps", "position_offset", "classifier_bias", "rope_parameters", "use_cache", "type_vocab_size"}
NOT_SAID |= {
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "decoder_start_token_id",
    "tie_word_embeddings",
    "share_encoder_decoder_embeddings",
}
HEAD = """# Architectures

Written by `make architectures` from the tables in `hf_scratch_transformer/conversion/`; the last two columns are
measured then, with {versions}. All go both ways, into ours and back to
the same tensors, bit for bit, and the same configuration; but for copies that a model has and never looks at.

- **Heads**: the classes on both sides; the backbone is one of them.
- **Options**: fields of our configuration, or of its `rope_parameters`, that some model of that architecture has not at
  their default; sizes, and what matters in training only, are left out.
- **Difference**: the largest, of logits or else of states, between the native model and ours, in single precision, over
  all heads of three models with other options each, every number in which is drawn at random (biases and norms too);
  beside it the largest number of that output.

| Architecture | Heads | Options | Difference | of up to |
|---|---|---|---|---|
"""


def options(config: Any) -> set[str]:
    """Those that are not at their default."""
    used = {
        field.name for field in dataclasses.fields(config) if getattr(config, field.name) != field.default
    } - NOT_SAID
    if config.attention_output_bias == config.attention_bias:
        used -= {"attention_output_bias"}
    if {*getattr(config, "layer_types", ())} == {"full_attention"}:
        used -= {"layer_types", "sliding_window"}
    if any(rope.get("partial_rotary_factor", 1.0) != 1.0 for rope in rotations(config.rope_parameters)):
        used |= {"partial_rotary_factor"}
    return used


def row(family: Family) -> str:
    used, found = set(), []
    for size in range(len(MODELS.SIZES[family.native])):
        for task in family.heads:
            theirs = MODELS.native(family.native, task, size)
            ours = convert_from(theirs)
            used |= options(ours.config)
            found.append(compare(theirs, ours))
    worst = max(found, key=lambda each: each.difference)
    heads = ", ".join(task or "backbone" for task in family.heads)
    listed = ", ".join(f"`{name}`" for name in sorted(used)) or "none"
    return f"| `{family.native}` | {heads} | {listed} | {worst.difference:.0e} | {worst.reach:.2g} |"


def main() -> None:
    versions = f"torch {torch.__version__.partition('+')[0]} and transformers {transformers.__version__}"
    text = HEAD.format(versions=versions)
    PAGE.write_text(text + "\n".join(row(family) for family in FAMILIES.values()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
