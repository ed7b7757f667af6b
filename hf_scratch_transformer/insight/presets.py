"""Where the configuration to look at comes from: a published shape by name, a file, a folder or the Hub."""

import difflib
import json
import os
from pathlib import Path
from typing import Any

from huggingface_hub.utils import logging
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import CONFIG_NAME

from ..configuration_scratch import ScratchDecoderConfig, ScratchSeq2SeqConfig
from ..files import reading

# "Attention Is All You Need", table 3; one vocabulary of about 37,000 for both languages (section 5.1).
_PAPER = {
    "vocab_size": 37000,
    "hidden_act": "relu",
    "position_embedding_type": "sinusoidal",
    "norm_type": "layer_norm",
    "norm_position": "post",
    "scale_embedding": True,
    "mlp_bias": True,
    "initialization": "xavier_uniform",
    "dropout": 0.1,
}
# "Language Models are Unsupervised Multitask Learners", Radford et al., 2019.
_GPT = {
    "vocab_size": 50257,
    "position_embedding_type": "learned",
    "norm_type": "layer_norm",
    "layer_norm_eps": 1e-5,
    "attention_bias": True,
    "mlp_bias": True,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "pad_token_id": None,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}
# "The Llama 3 Herd of Models", 2024, table 3.
_LLAMA_3 = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "hidden_act": "swiglu",
    "layer_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "dtype": "bfloat16",
}


def _width(hidden_size: int, heads: int, intermediate_size: int | None = None) -> dict[str, int]:
    return {
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "intermediate_size": intermediate_size or 4 * hidden_size,
    }


# name -> family, fields. Published models in the terms of our own families, which can express them.
PRESETS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "attention-is-all-you-need-base": (ScratchSeq2SeqConfig, _PAPER | _width(512, 8)),
    "attention-is-all-you-need-big": (ScratchSeq2SeqConfig, _PAPER | _width(1024, 16) | {"dropout": 0.3}),
    "gpt-2": (
        ScratchDecoderConfig,
        _GPT | _width(768, 12) | {"num_hidden_layers": 12, "max_position_embeddings": 1024},
    ),
    # "Language Models are Few-Shot Learners", Brown et al., 2020, table 2.1.
    "gpt-3": (
        ScratchDecoderConfig,
        _GPT | _width(12288, 96) | {"num_hidden_layers": 96, "max_position_embeddings": 2048},
    ),
    "llama-3-8b": (ScratchDecoderConfig, _LLAMA_3 | _width(4096, 32, 14336) | {"num_hidden_layers": 32}),
    "llama-3-70b": (ScratchDecoderConfig, _LLAMA_3 | _width(8192, 64, 28672) | {"num_hidden_layers": 80}),
}


def read_config(source: str | os.PathLike[str]) -> PreTrainedConfig:
    """The configuration behind `source`: the name of a preset, a `config.json` of any native architecture or of ours, a
    folder that holds one, or a Hub id, for which the network is asked only if the local cache does not have it.

    No code of a repository is run.

    Raises:
        ValueError: for a name that is none of these, with the nearest preset; for a file that describes no model.
    """
    name = os.fspath(source)
    if name in PRESETS:
        family, fields = PRESETS[name]
        return family(**fields)
    path = Path(name)
    if path.is_dir():
        if not (path / CONFIG_NAME).is_file():
            model = path / "model" if (path / "model" / CONFIG_NAME).is_file() else "the folder of a checkpoint"
            raise ValueError(f"{path}: no {CONFIG_NAME} in this folder; give {model}")
        path = path / CONFIG_NAME
    if path.is_file():
        return _read_file(path)
    nearest = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.6)
    presets = f"the presets are {', '.join(PRESETS)}" if not nearest else f"did you mean the preset {nearest[0]!r}?"
    if path.suffix == ".json" or path.is_absolute() or name.count("/") > 1:
        raise ValueError(f"{name}: there is no such file or folder; {presets}")
    if nearest and "/" not in name:
        raise ValueError(f"{name}: neither a preset, nor a file, nor a folder; {presets}")
    problem: Exception | None = None
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # each failed attempt would be a line of its own
    try:
        for local in (True, False):
            try:
                return AutoConfig.from_pretrained(name, local_files_only=local, trust_remote_code=False)
            except (OSError, ValueError) as error:
                problem = error
    finally:
        logging.set_verbosity(verbosity)
    reason = " ".join(str(problem).split())
    raise ValueError(f"{name}: neither a preset, nor a file, nor a folder, nor found on the Hub; {presets} ({reason})")


def _read_file(path: Path) -> PreTrainedConfig:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ValueError(f"{path}: no model_type in it, so it is not the configuration of a model")
    if not isinstance(fields["model_type"], str) or fields["model_type"] not in CONFIG_MAPPING:
        raise ValueError(f"{path}: model_type={fields['model_type']!r} is not known to transformers or to us")
    if not _are_names(fields.get("architectures")):
        raise ValueError(f"{path}: architectures={fields['architectures']!r} must be a list of names of classes")
    with reading(path):
        return AutoConfig.from_pretrained(path, trust_remote_code=False)


def _are_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))
