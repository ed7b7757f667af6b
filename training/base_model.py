"""The model that a run goes on from, where its recipe names one: ours, or a native one, which becomes ours."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from hf_scratch_transformer import ScratchConfig
from hf_scratch_transformer.conversion import convert_from
from hf_scratch_transformer.conversion.folders import native_task
from hf_scratch_transformer.files import possible_path
from hf_scratch_transformer.insight.plot import open_model
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


def open_base(source: str, config: PreTrainedConfig, auto_model: Any) -> PreTrainedModel:
    """A model of that configuration with the parameters of a saved one, in single precision.

    Raises ValueError when it is another task's, or its parameters have other shapes.
    """
    wanted = auto_model._model_mapping.get(type(config), None)
    if wanted is None:
        raise ValueError(f"{source} is a {config.model_type}, of which there is no {auto_model.__name__}")
    folder = located(source)
    is_ours = isinstance(read_config(folder), ScratchConfig)
    saved = open_model(folder, auto_model, attention=None) if is_ours else convert_from(folder)
    if type(saved) is not wanted:
        raise ValueError(f"{source} has another head: it is a {type(saved).__name__}, not a {wanted.__name__}")
    model = auto_model.from_config(config, dtype=torch.float32)
    try:
        model.load_state_dict(saved.state_dict())
    except RuntimeError as error:
        reason = str(error).splitlines()[1:]
        raise ValueError(f"{source}: its weights do not fit the fields given: {' '.join(reason[0].split())}") from error
    weights = model.state_dict()
    for name, tensor in saved.state_dict().items():
        if not torch.equal(weights[name], tensor.to(weights[name])):
            raise ValueError(f"{source}: its weights do not fit the fields given: {name} would be another tensor")
    if saved.can_generate():
        model.generation_config = saved.generation_config
        for name in SPECIAL_IDS:
            if (value := getattr(config, name, None)) != getattr(saved.config, name, None):
                setattr(model.generation_config, name, value)
    return model


def fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 over all parameters: two models that begin alike have the same."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
