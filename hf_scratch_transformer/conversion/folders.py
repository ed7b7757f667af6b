"""Conversion of models in memory, and from folder to folder one tensor at a time."""

import contextlib
import copy
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

import hf_scratch_transformer

from ..configuration_scratch import ScratchConfig, ScratchDecoderConfig, ScratchEncoderConfig, ScratchSeq2SeqConfig
from ..files import is_repository_id, making, new_folder, reading
from ..stack_scratch import ScratchPreTrainedModel
from ..tokenization import check_rows, sides
from ..tokenization_scratch import TARGET_FILE, ScratchTranslationTokenizer
from .comparison import Comparison, compare
from .families import FAMILIES
from .tables import Family
from .weights import FolderWeights, Lazily, Translation, describe, in_short, stored, stored_names

OUR_CONFIGS = {
    config.model_type: config for config in (ScratchEncoderConfig, ScratchDecoderConfig, ScratchSeq2SeqConfig)
}
SHARD_SIZE = "1GB"
NOWHERE, IN_SINGLE = {"pretrained_model_name_or_path": None}, {"dtype": torch.float32}
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "target_vocab*",  # of Marian, if it has one for each language
    "merges.txt",
    "*.spm",
    "*.model",
    "chat_template*",
    "additional_chat_templates/*",
)


def convert_from(source: PreTrainedModel | str | os.PathLike[str]) -> ScratchPreTrainedModel:
    """Our model with the parameters of a native one.

    Args:
        source: a model of transformers; or a folder or an id on the Hub with its safetensors; or a GGUF file.

    Returns:
        The model of ours with the same head, in evaluation mode unless the source is in training, of the same dtype,
        sharing no storage with the source. It computes the same at every non-padding token; padding has positions of
        its own, so that outputs there may differ, and with them the loss of a head that looks for an answer there too.

    Raises:
        ValueError: if the architecture or one of its options has no counterpart, or if parameters are missing,
            unexpected or of the wrong shape. The message names them all.
    """
    if isinstance(source, PreTrainedModel):
        return _translated(source, *native_task(source.config, type(source).__name__))
    with _opened(source) as (folder, config, weights):
        if isinstance(config, ScratchConfig):
            raise ValueError(
                f"{source} is one of our models already ({config.model_type}): open it with from_pretrained"
            )
        translation = Translation(*native_task(config), config, weights)
        model = translation.result()
        if model.can_generate():
            model.generation_config = _generation_config(folder, config)
        return model


@dataclass(frozen=True)
class Saved:
    """A model of ours in a folder, or a native one there as ours, of which only the description has been read."""

    folder: Path  # with everything else that belongs to it
    model: ScratchPreTrainedModel  # without memory
    weights: Lazily  # by the names under which it saves them
    generation_config: GenerationConfig | None

    @property
    def dtype(self) -> torch.dtype:
        """That of the first parameter."""
        return next(iter(self.weights.described.values())).dtype

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Raises ValueError if there is none, or one of two vocabularies with more tokens than the model has rows."""
        return _read_tokenizer(AutoTokenizer, self.folder, self.model.config)

    def whole(self, dtype: torch.dtype | None = None) -> ScratchPreTrainedModel:
        """The model with its parameters, all of which are there."""
        kind, config = type(self.model), self.model.config
        model = kind.from_pretrained(None, config=config, state_dict=dict(self.weights), dtype=dtype or self.dtype)
        if self.generation_config is not None:
            model.generation_config = self.generation_config
        return model


def open_saved(source: str | os.PathLike[str]) -> Saved:
    """A saved model as ours, whose parameters are read, and converted, one at a time.

    Args:
        source: a folder, or an id on the Hub, of one of ours or a native one.

    Raises:
        ValueError: as `convert_from`, or for a class of ours that there is not.
    """
    with _opened(source) as (folder, config, weights):
        if not isinstance(config, ScratchConfig):
            translation = Translation(*native_task(config), config, weights)
            model, described, read = translation.model, translation.shapes, translation.tensor
        else:
            with torch.device("meta"):
                name = _architecture(config)
                model_class = getattr(hf_scratch_transformer, name, None)
                if not (isinstance(model_class, type) and issubclass(model_class, ScratchPreTrainedModel)):
                    raise ValueError(f"{os.fspath(source)}: config.json: architectures: there is no {name}")
                model = model_class(config)
            held, expected = describe(weights), stored(model)
            names = stored_names(model, held, lambda name: False)
            described = {name: held.get(str(names[name]), each) for name, each in expected.items()}  # of their types

            def read(name: str) -> Tensor:
                return weights[str(names[name])]

            for name, tied in model.all_tied_weights_keys.items():
                if name in weights and not torch.equal(weights[name], read(tied)):
                    raise ValueError(f"{source}: its config.json makes {name} one with {tied}, but they differ")

        settings = _generation_config(folder, config) if model.can_generate() else None
        return Saved(folder, model, Lazily(described, read), settings)


def open_ours(source: str | os.PathLike[str], engine: str) -> Saved:
    """A model of ours that is to become a file of an engine, of which nothing is missing.

    Raises:
        ValueError: as `open_saved`, and for another's model.
    """
    if not isinstance(config := read_config(_located(source)), ScratchConfig):
        raise ValueError(f"{source} is a {config.model_type} model; models of ours become {engine}")
    return open_saved(source)


def convert_to(model: ScratchPreTrainedModel, family: str) -> PreTrainedModel:
    """The native model with the parameters of one of ours: it needs neither this package nor `trust_remote_code`.

    Args:
        model: any of ours.
        family: `"bert"`, `"llama"`, ...: the `model_type` of transformers.

    Raises:
        ValueError: if the family is unknown or has no such head, or with every option that stands in the way and what
            it would have to be.
    """
    if not isinstance(model, ScratchPreTrainedModel):
        raise ValueError(f"{type(model).__name__} is not one of our models")
    return _translated(model, *our_task(type(model).__name__, family))


@dataclass(frozen=True)
class Report:
    """What became of a model on its way to another folder."""

    source: str  # its class
    target: str
    tensors: int
    parameters: int
    kept: tuple[str, ...]  # options without counterpart that change nothing that is computed: noted for the way back
    compared: Comparison | None
    by: str = "transformers"  # the package that computed what was compared
    has_two_vocabularies: bool = False  # of the tokenizer, as no fast one of transformers has

    def __str__(self) -> str:
        lines = [f"{self.source} as {self.target}: {self.tensors} tensors, {self.parameters:,} parameters"]
        if self.kept:
            lines.append(f"without counterpart, noted for the way back: {', '.join(self.kept)}")
        if self.has_two_vocabularies:
            lines.append("its tokenizer, of two vocabularies, is read with trust_remote_code=True")
        return "\n".join(lines + ([] if self.compared is None else [str(self.compared)]))


def convert_folder(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    family: str | None = None,
    verify: bool = False,
) -> Report:
    """Write a folder converted from another: parameters, configuration, generation settings and tokenizer.

    Parameters go through memory one at a time, and are written in shards of at most 1 GB. `target` appears once all of
    it is there.

    Args:
        source: a folder, an id on the Hub, or a GGUF file (which is held in memory).
        target: a folder that does not exist yet.
        family: of the target, if the source is one of our models; `None` for ours, if it is a native one.
        verify: open both as the programs that use them would, in single precision and in memory at once, and compare
            what they compute of the same tokens.

    Raises:
        ValueError: as `convert_from` and `convert_to`, if `target` exists, and if it computes something else.
    """
    target = new_folder(target)
    with _opened(source) as (folder, config, weights):
        if isinstance(config, ScratchConfig):
            if family is None:
                raise ValueError(
                    f"{source} is one of our models: name what to convert it to, one of {', '.join(FAMILIES)}"
                )
            architecture = _architecture(config)
            task = our_task(architecture, family)
        elif family is not None:
            raise ValueError(
                f"{source} is a {config.model_type} model, and only ours become {family}: convert it to ours first"
            )
        else:
            task = native_task(config)
        try:
            translation = Translation(*task, config, weights)
        except ValueError as error:
            others = _counterparts(config) if isinstance(config, ScratchConfig) else []
            raise ValueError(f"{error}" + (f"; it can become {', '.join(others)}" if others else "")) from error
        with making(target) as new:
            new.mkdir()
            _write_weights(translation, new)
            _write_configuration(translation, new)
            if translation.model.can_generate():
                _generation_config(folder, config).save_pretrained(new)
            _copy_tokenizer(folder, config, new)
            compared = None
            if verify:
                is_folder = isinstance(weights, FolderWeights)
                saved = {"pretrained_model_name_or_path": folder} if is_folder else {"state_dict": dict(weights)}
                before = translation.source_class.from_pretrained(**{**NOWHERE, **saved}, config=config, **IN_SINGLE)
                after = type(translation.model).from_pretrained(new, **IN_SINGLE)
                compared = compare(before, after)
                if not compared.is_close:
                    raise ValueError(f"{source}: {type(after).__name__} would compute something else; {compared}")
    kept = () if family else tuple(sorted(translation.config.converted_from.keys() - {"model_type"}))
    return Report(
        translation.source_class.__name__,
        type(translation.model).__name__,
        len(translation.shapes),
        translation.model.num_parameters(),
        kept,
        compared,
        has_two_vocabularies=(target / TARGET_FILE).exists(),
    )


def _counterparts(config: ScratchConfig) -> list[str]:
    """The families that have all of its options."""
    found = []
    for name in FAMILIES:
        with contextlib.suppress(ValueError):
            family, task = our_task(_architecture(config), name)
            family.config_back(config, task)
            found.append(name)
    return found


def native_task(config: PreTrainedConfig, architecture: str | None = None) -> tuple[Family, str]:
    """The family and task of a native model."""
    family = _family(config.model_type)
    architecture = architecture or _architecture(config)
    for task, head in family.heads.items():
        if head.native == architecture:
            return family, task
    if architecture in family.taken_as:
        return family, family.taken_as[architecture]
    known = ", ".join(head.native for head in family.heads.values())
    raise ValueError(f"{architecture} has no counterpart here; of {family.native}, these have one: {known}")


def our_task(architecture: str, family: str) -> tuple[Family, str]:
    """The family to convert to, and the task of our class of that name."""
    task = architecture.partition("For")[2]
    target = _family(family)
    start = target.config.__name__.removesuffix("Config")
    if not architecture.startswith(start if task else f"{start}Model") or task not in target.heads:
        known = ", ".join(target.our_class(task).__name__ for task in target.heads)
        raise ValueError(f"{architecture} cannot become {family}; these can: {known}")
    return target, task


def _family(name: str) -> Family:
    if name not in FAMILIES:
        raise ValueError(f"unknown architecture {name!r}; known are {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _architecture(config: PreTrainedConfig) -> str:
    if not isinstance(config.architectures, list) or not config.architectures:
        raise ValueError(
            f"config.json: architectures={config.architectures} must be a list with the name of a class: open the "
            "model with the class it is meant for, and convert that"
        )
    return str(config.architectures[0])


def _translated(source: PreTrainedModel, family: Family, task: str) -> PreTrainedModel:
    translation = Translation(family, task, source.config, source.state_dict())
    model = translation.result().to(source.device).train(source.training)
    model.config.dtype, model.config.name_or_path = source.config.dtype, source.config.name_or_path
    if model.can_generate():
        model.generation_config = copy.deepcopy(source.generation_config)
    return model


@contextlib.contextmanager
def _opened(source: str | os.PathLike[str]) -> Iterator[tuple[Path, PreTrainedConfig, Mapping[str, Tensor]]]:
    """A folder with everything but the weights, the configuration, and the weights: of a folder, a download, or a GGUF
    file, which transformers reads into memory."""
    path = Path(source)
    if path.suffix == ".gguf" and path.is_file():
        with tempfile.TemporaryDirectory() as unpacked:
            if importlib.util.find_spec("gguf") is None:
                raise ValueError(f"{path}: to be read, it needs gguf: pip install gguf")
            from .gguf import open_gguf

            with reading(path):
                model, found = open_gguf(path)
            if missing := sorted(found["missing_keys"]):  # which transformers draws at random
                raise ValueError(f"{path}: {len(missing)} weights are missing: {in_short(missing)}")
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            model.generation_config.save_pretrained(unpacked)
            AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(unpacked)
            model.config.architectures = [type(model).__name__]
            yield Path(unpacked), model.config, model.state_dict()
        return
    folder = _located(source)
    yield folder, read_config(folder), FolderWeights(folder)


def _located(source: str | os.PathLike[str]) -> Path:
    """The folder of that name, or of a download."""
    path = Path(source)
    if not path.exists():
        if not is_repository_id(str(source)):
            raise ValueError(f"{source} is neither a folder nor the id of a repository, owner/name")
        with reading(source):
            path = Path(snapshot_download(str(source), allow_patterns=["*.json", "*.safetensors", *TOKENIZER_FILES]))
    return path


def read_config(folder: Path) -> PreTrainedConfig:
    if not (folder / CONFIG_NAME).is_file():
        raise ValueError(f"{folder} holds no {CONFIG_NAME}: a model's folder is needed, or a .gguf file")
    with reading(folder / CONFIG_NAME):
        model_type = str(json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8")).get("model_type"))
    config_class = OUR_CONFIGS.get(model_type) or CONFIG_MAPPING[_family(model_type).native]
    with reading(folder / CONFIG_NAME):
        return config_class.from_pretrained(folder)


def _generation_config(folder: Path, config: PreTrainedConfig) -> GenerationConfig:
    if (folder / GENERATION_CONFIG_NAME).exists():
        with reading(folder / GENERATION_CONFIG_NAME):
            return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_model_config(config)


def write_rest(saved: Saved, model: ScratchPreTrainedModel, folder: Path) -> None:
    """Configuration, generation settings and tokenizer, beside what an engine runs."""
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    if (saved.folder / TOKENIZER_CONFIG).exists():
        saved.tokenizer().save_pretrained(folder)


def _write_weights(translation: Translation, folder: Path) -> None:
    names = {translation.name_in_files(name): name for name in translation.shapes}
    split = split_torch_state_dict_into_shards(
        {saved: translation.shapes[name] for saved, name in names.items()},
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=SHARD_SIZE,
    )
    for file, saved in split.filename_to_tensors.items():
        save_file({name: translation.tensor(names[name]) for name in saved}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")


def _write_configuration(translation: Translation, folder: Path) -> None:
    config = translation.config
    config.architectures = [type(translation.model).__name__]
    config.dtype = str(translation.dtype).removeprefix("torch.")
    config.save_pretrained(folder)


def _copy_tokenizer(source: Path, config: PreTrainedConfig, target: Path) -> None:
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            if file.is_file():
                copied = target / file.relative_to(source)
                copied.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copied)
    path = target / TOKENIZER_CONFIG
    if not path.exists():
        return
    with reading(source / TOKENIZER_CONFIG):
        settings = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(settings, dict):
        raise ValueError(f"{source / TOKENIZER_CONFIG} must be a mapping, not a {type(settings).__name__}")
    # Without a class of its own a tokenizer is found by the model's type, which is another one now.
    if "tokenizer_class" not in settings and config.model_type in TOKENIZER_MAPPING_NAMES:
        settings["tokenizer_class"] = TOKENIZER_MAPPING_NAMES[config.model_type]
        path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    # No fast tokenizer of transformers has two vocabularies: beside a native model, too, its code goes along.
    if settings.get("tokenizer_class") == ScratchTranslationTokenizer.__name__:
        _read_tokenizer(ScratchTranslationTokenizer, source, config).save_pretrained(target)


def _read_tokenizer(reader: Any, folder: Path, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """A model's tokenizer, read by a class. Raises ValueError as `Saved.tokenizer`."""
    with reading(folder):
        tokenizer = reader.from_pretrained(folder)
        source, target = sides(tokenizer)
        if target is not source:
            check_rows(source, config)
            check_rows(target, config, target=True)
    return tokenizer
