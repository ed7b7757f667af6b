"""Parameters on their way from one model to another, one at a time: what a source holds, what a target needs.

A source is a model or a folder with safetensors; both are checked against what their configuration promises before
anything is converted.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from ..configuration_scratch import ScratchConfig
from ..files import reading
from .tables import Family, leaf_of, steps_back, steps_into

logger = logging.get_logger(__name__)

# Buffers that older versions of transformers saved, and what fairseq left behind; none holds a weight.
NO_WEIGHTS = re.compile(r"(position_ids|token_type_ids|attn\.(masked_)?bias|rotary_emb\.inv_freq|coder\.version)$")
NAMED = 8  # parameters of a kind that a message names


class FolderWeights(Mapping[str, Tensor]):
    """The tensors of a folder's safetensors, each read when asked for.

    Raises:
        ValueError: if there are none.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        index = folder / SAFE_WEIGHTS_INDEX_NAME
        if index.exists():
            with reading(index):
                self.files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                if not all(isinstance(each, str) for pair in self.files.items() for each in pair):
                    raise TypeError("weight_map must name a file for each tensor")
        elif (folder / SAFE_WEIGHTS_NAME).exists():
            with self._opened(SAFE_WEIGHTS_NAME) as file:
                self.files = dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME)
        elif pickles := sorted(path.name for path in folder.glob("*.bin")):
            raise ValueError(
                f"{folder} holds no safetensors but {pickles[0]}, a pickle, which runs the code that is in it and is "
                "never opened here. If you trust it, open it with transformers' from_pretrained and write it with "
                "save_pretrained to a new folder, which then holds safetensors"
            )
        else:
            raise ValueError(f"{folder} holds neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}")
        if absent := sorted({file for file in self.files.values() if not (folder / file).exists()}):
            raise ValueError(f"{folder}: {', '.join(absent)} is missing, which {SAFE_WEIGHTS_INDEX_NAME} names")

    @contextmanager
    def _opened(self, file: str) -> Iterator[Any]:
        with reading(self.folder / file), safe_open(self.folder / file, framework="pt") as opened:
            yield opened

    def __getitem__(self, name: str) -> Tensor:
        # Opened anew each time: an open file keeps every page that was read from it in memory.
        with self._opened(self.files[name]) as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def described(self) -> dict[str, Tensor]:
        """Each tensor without its content, on the meta device."""
        tensors = {}
        for file in sorted(set(self.files.values())):
            with self._opened(file) as opened:
                for name in opened.keys():  # noqa: SIM118 (it is no dictionary)
                    part = opened.get_slice(name)
                    shape = part.get_shape()
                    dtype = part[:0].dtype if shape else opened.get_tensor(name).dtype
                    tensors[name] = torch.empty(shape, dtype=dtype, device="meta")
                    if self.files.get(name) != file:
                        raise ValueError(
                            f"{self.folder}: {name} is in {file}, not where {SAFE_WEIGHTS_INDEX_NAME} says"
                        )
        if absent := self.files.keys() - tensors.keys():
            which = in_short(sorted(absent))
            raise ValueError(f"{self.folder}: {which} not in the files that {SAFE_WEIGHTS_INDEX_NAME} says")
        return tensors


class Lazily(Mapping[str, Tensor]):
    """Tensors by name, each read or computed when asked for; `described` has them without their content."""

    def __init__(self, described: Mapping[str, Tensor], read: Callable[[str], Tensor]):
        self.described, self.read = described, read

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.described)

    def __len__(self) -> int:
        return len(self.described)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, which is not read for it."""
        return tuple(self.described[name].shape)


def describe(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if isinstance(weights, FolderWeights):
        return weights.described()
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in weights.items()}


def stored(model: PreTrainedModel) -> dict[str, Tensor]:
    """What a model saves: its state less tied copies and what it computes anew."""
    left_out = {*model.all_tied_weights_keys, *(model._keys_to_ignore_on_save or ())}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in left_out}


def head_of(model: PreTrainedModel) -> str | None:
    """The name of the parameter by which it predicts tokens."""
    head = model.get_output_embeddings()
    return next((f"{name}.weight" for name, module in model.named_modules() if module is head and head), None)


def held_apart(model: PreTrainedModel, weights: Mapping[str, Tensor], name_in_files: Callable[[str], str]) -> set[str]:
    """Parameters that a model's configuration ties to others, and that have other numbers than those in a source: the
    heads of FLAN-T5, whose configuration says that every T5 has one table."""
    return {
        tied
        for tied, source in model.all_tied_weights_keys.items()
        for one, other in {(tied, source), (name_in_files(tied), name_in_files(source))}
        if one in weights and other in weights and not torch.equal(weights[one], weights[other])
    }


def stored_names(
    model: PreTrainedModel,
    described: Mapping[str, Tensor],
    of_another_head: Callable[[str], bool],
    name_in_files: Callable[[str], str] = str,
) -> dict[str, str | None]:
    """{parameter that a model saves: its name in a source}; `None` where there is none and zeros are meant.

    A source may name the backbone's parameters with or without the prefix they have below a head, scales and shifts of
    norms as BERT's authors did, and may hold copies of what is tied.

    Raises:
        ValueError: on missing and unexpected parameters and on wrong shapes.
    """
    expected, tied, prefix = stored(model), model.all_tied_weights_keys, f"{model.base_model_prefix}."
    known = model.state_dict()
    renamed = {name_in_files(name): name for name in known}
    names: dict[str, str | None] = {}
    copies: dict[str, str] = {}
    unexpected, left_out = [], []
    for actual in described:
        modern = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", actual))
        modern = renamed.get(modern, modern)
        spellings = [name for name in (modern, prefix + modern, modern.removeprefix(prefix)) if name in known]
        if not spellings:
            if of_another_head(modern):
                left_out.append(actual)
            elif not NO_WEIGHTS.search(modern):
                unexpected.append(actual)
        elif spellings[0] in expected:
            names.setdefault(spellings[0], actual)
        elif spellings[0] in tied:
            copies.setdefault(tied[spellings[0]], actual)
    names = {**copies, **names}
    zeros = re.compile("|".join(model._keys_to_ignore_on_load_missing or ["(?!)"]))
    names |= {name: None for name in expected if name not in names and zeros.search(name)}
    wrong_shapes = [
        f"{actual} is {tuple(described[actual].shape)}, not {tuple(expected[name].shape)}"
        for name, actual in names.items()
        if actual is not None and described[actual].shape != expected[name].shape
    ]
    no_numbers = [
        f"{actual} is {described[actual].dtype}"
        for actual in names.values()
        if actual is not None and not described[actual].is_floating_point()
    ]
    complaints = {
        "of the wrong type": no_numbers,
        "missing": [name for name in expected if name not in names],
        "unexpected": unexpected,
        "of the wrong shape": wrong_shapes,
    }
    if any(complaints.values()):
        kinds = [f"{kind}: {in_short(found)}" for kind, found in complaints.items() if found]
        raise ValueError(f"these are not the parameters of a {type(model).__name__}; {'; '.join(kinds)}")
    if left_out:
        logger.warning(f"Left out, since {type(model).__name__} has no such head: {in_short(left_out)}")
    return names


def in_short(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


class Translation:
    """A model as another architecture: its configuration, and each of its parameters.

    Args:
        family: the native side.
        task: of both.
        source: configuration of the model to convert: theirs, or ours to go back.
        weights: its parameters, under the names its class or an older version of it has.

    Raises:
        ValueError: on options without counterpart, on missing and unexpected parameters and on wrong shapes, each by
            its name. Nothing has been read or computed by then.
    """

    def __init__(self, family: Family, task: str, source: PreTrainedConfig, weights: Mapping[str, Tensor]):
        is_back = isinstance(source, ScratchConfig)
        self.config = family.config_back(source, task) if is_back else family.config_into(source, task)
        ours, theirs = (source, self.config) if is_back else (self.config, source)
        native_class = family.native_class(task)
        # A pooler is no option of a native backbone's configuration but an argument of its class.
        self.arguments: dict[str, Any] = {}
        if not task and "add_pooling_layer" in inspect.signature(native_class.__init__).parameters:
            if not is_back and not any("pooler." in name for name in weights):
                ours.pooler_act = None
            self.arguments = {"add_pooling_layer": ours.pooler_act is not None}
        described = describe(weights)
        with torch.device("meta"):
            native_model = native_class(theirs, **self.arguments)
        if not is_back and (table := native_model.get_input_embeddings()) is not None:
            ours.train_padding_embedding = ours.pad_token_id is not None and table.padding_idx is None
        head = head_of(native_model)
        if is_back:
            apart = {head} if head and not ours.tie_word_embeddings else set()
        elif apart := held_apart(native_model, weights, family.name_in_files):
            if apart != {head}:
                raise ValueError(f"its configuration makes {in_short(sorted(apart))} one with others, but they differ")
            ours.tie_word_embeddings = False
        for name in apart & native_model.all_tied_weights_keys.keys():  # as transformers has it where they differ
            del native_model.all_tied_weights_keys[name]
        with torch.device("meta"):
            our_model = family.our_class(task)(ours)
        source_model: PreTrainedModel = our_model if is_back else native_model
        self.source_class = type(source_model)
        self.model: PreTrainedModel = native_model if is_back else our_model

        def of_another_head(name: str) -> bool:
            rows = (link for head in family.heads for link in family.links(head, ours))
            return not is_back and (
                name.startswith(family.left_out) or any(leaf_of(name, link.theirs) is not None for link in rows)
            )

        self.weights, self.described = weights, described
        self.source = stored(source_model)
        # As files have the parameters of the source, and of the target.
        self.name_in_files: Callable[[str], str] = family.name_in_files if is_back else str
        in_source = str if is_back else family.name_in_files
        self.names = stored_names(source_model, self.described, of_another_head, in_source)
        self.dtype = next(self.described[actual].dtype for actual in self.names.values() if actual is not None)
        links = family.links(task, ours)
        targets = {name: tensor.to(self.dtype) for name, tensor in stored(self.model).items()}
        self.steps = steps_back(links, targets) if is_back else steps_into(links, targets, self.names)
        for name, step in self.steps.items():  # biases that theirs has, and ours has not
            for missing in set(step.inputs) - self.names.keys():
                self.source[missing], self.names[missing] = targets[name], None
        self.shapes = {name: self.shape(name) for name in targets}
        wrong = [
            f"{name} would be {tuple(self.shapes[name].shape)}, not {tuple(target.shape)}"
            for name, target in targets.items()
            if self.shapes[name].shape != target.shape
        ]
        if wrong:
            raise ValueError(f"{type(self.model).__name__} has other shapes: {in_short(wrong)}")

    def tensor(self, name: str) -> Tensor:
        """One parameter of the target, in a storage of its own."""
        inputs = ((source, self.names[source]) for source in self.steps[name].inputs)
        tensors = tuple(
            torch.zeros(self.source[source].shape, dtype=self.dtype) if actual is None else self.weights[actual]
            for source, actual in inputs
        )
        return self.steps[name].apply(tensors).clone(memory_format=torch.contiguous_format)

    def shape(self, name: str) -> Tensor:
        """The same without its content, on the meta device."""
        inputs = ((source, self.names[source]) for source in self.steps[name].inputs)
        tensors = tuple(self.source[source] if actual is None else self.described[actual] for source, actual in inputs)
        return self.steps[name].apply(tensors).to("meta")

    def result(self) -> PreTrainedModel:
        """The target in memory."""
        state = {name: self.tensor(name) for name in self.steps}
        arguments = {} if isinstance(self.config, ScratchConfig) else self.arguments
        return type(self.model).from_pretrained(
            None, config=self.config, state_dict=state, dtype=self.dtype, **arguments
        )
