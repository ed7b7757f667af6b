"""The model that a run goes on from, where its recipe names one: ours, or a native one, which becomes ours."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from hf_scratch_transformer import ScratchConfig
from hf_scratch_transformer.conversion.folders import native_task, open_saved
from hf_scratch_transformer.conversion.weights import stored
from hf_scratch_transformer.files import possible_path
from hf_scratch_transformer.insight.plot import check_settings
from hf_scratch_transformer.insight.presets import PRESETS, read_config

PATH = "path"  # the field of a recipe's section `model` that names it
SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")


def located(source: str) -> str:
    """A folder, with the home folder in its place, or an id on the Hub. Raises ValueError for what cannot be either."""
    path = Path(possible_path(source)).expanduser()
    if not source or source in PRESETS or path.is_file():
        raise ValueError(f"{source!r}: must be the folder of a saved model, or its id on the Hub")
    return str(path) if source.startswith("~") else source


def base_config(source: str) -> PreTrainedConfig:
    """The configuration of a saved model, or ours for that of a native one.

    Raises ValueError when there is none, or its architecture or an option has no counterpart.
    """
    config = read_config(located(source))
    if isinstance(config, ScratchConfig):
        return config
    family, task = native_task(config)
    return family.config_into(config, task)


def build_config(section: Mapping[str, Any], defaults: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration that a recipe's section `model` describes: of a new model, or of a saved one with some fields
    changed; `defaults` fill in what is left open.

    Raises whatever a configuration class does, and ValueError as `base_config`.
    """
    if PATH not in section:
        return AutoConfig.for_model(**{**defaults, **section})
    own = {name: value for name, value in section.items() if name != PATH}
    base = base_config(section[PATH])
    if own.get("model_type", base.model_type) != base.model_type:
        raise ValueError(f"model_type {own['model_type']!r}: {section[PATH]} is trained on as {base.model_type}")
    lacking = {name: value for name, value in defaults.items() if getattr(base, name, None) is None}
    return type(base).from_dict({**base.to_dict(), **lacking, **own})


def open_base(source: str, config: PreTrainedConfig, auto_model: Any) -> tuple[PreTrainedModel, Mapping[str, Tensor]]:
    """A new model of that configuration, in single precision, and the parameters of a saved one for it, which are read
    one at a time.

    Raises ValueError when it is another task's, or its parameters have other shapes.
    """
    wanted = auto_model._model_mapping.get(type(config), None)
    if wanted is None:
        raise ValueError(f"{source} is a {config.model_type}, of which there is no {auto_model.__name__}")
    saved = open_saved(located(source))
    if type(saved.model) is not wanted:
        raise ValueError(f"{source} has another head: it is a {type(saved.model).__name__}, not a {wanted.__name__}")
    model = auto_model.from_config(config, dtype=torch.float32)
    described = stored(model)
    for name in sorted(described.keys() | saved.weights.keys()):
        own, other = (
            tuple(some[name].shape) if name in some else None for some in (described, saved.weights.described)
        )
        if own != other:
            what = f"{name} is {other or 'not there, or that of another'}, not {own or 'one of its own'}"
            raise ValueError(f"{source}: its weights do not fit the fields given: {what}")
    if saved.generation_config is not None:
        check_settings(f"{source}: {GENERATION_CONFIG_NAME}", vars(saved.generation_config))
        model.generation_config = saved.generation_config
        for name in SPECIAL_IDS:
            if (value := getattr(config, name, None)) != getattr(saved.model.config, name, None):
                setattr(model.generation_config, name, value)
    return model, saved.weights


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over all parameters of a saved model: runs that begin with the same have the same."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].float().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
