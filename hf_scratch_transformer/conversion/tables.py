"""What the table of a family is made of. Every row is read in both directions: `into` ours, `back` to theirs.

A family is what transformers calls a model type. A task is the end of a head's class name, such as `"MaskedLM"`; that
of a backbone is `""`.
"""

import copy
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

import hf_scratch_transformer

from ..configuration_scratch import ScratchConfig
from ..files import reading
from ..layers_scratch import SinusoidalPositions
from ..stack_scratch import ScratchPreTrainedModel

# Parameters


class Transform:
    """What happens to a parameter on its way: nothing, unless a subclass says otherwise."""

    def into(self, theirs: Tensor) -> tuple[Tensor, ...]:
        """One parameter of theirs as the parameters of ours."""
        return (theirs,)

    def part(self, theirs: tuple[Tensor, ...], index: int) -> Tensor:
        """One of them."""
        return self.into(*theirs)[index]

    def back(self, ours: tuple[Tensor, ...], like: Tensor) -> Tensor:
        """The inverse. `like` is a tensor on the meta device, of the shape and type that theirs has."""
        return ours[0]


class Joined(Transform):
    """Several of ours in one, one after the other, of so many rows each: what theirs multiplies at once."""

    def __init__(self, *rows: int):
        self.rows = rows

    def into(self, theirs: Tensor) -> tuple[Tensor, ...]:
        return theirs.split(self.rows)

    def back(self, ours: tuple[Tensor, ...], like: Tensor) -> Tensor:
        return torch.cat(ours)


class JoinedByGroup(Transform):
    """Queries, keys and values in one matrix: of each group of heads its queries, its keys and its values together
    (Falcon; GPT-NeoX, where each head is a group)."""

    def __init__(self, heads: int, groups: int):
        self.groups, self.parts = groups, (heads // groups, 1, 1)

    def into(self, theirs: Tensor) -> tuple[Tensor, ...]:
        by_group = theirs.unflatten(0, (self.groups, sum(self.parts), -1))
        return tuple(part.flatten(0, 2) for part in by_group.split(self.parts, dim=1))

    def back(self, ours: tuple[Tensor, ...], like: Tensor) -> Tensor:
        by_group = [part.unflatten(0, (self.groups, count, -1)) for part, count in zip(ours, self.parts, strict=True)]
        return torch.cat(by_group, dim=1).flatten(0, 2)


class Interleaved(Transform):
    """Queries or keys of heads of which neighbouring entries are turned together, in the first `turned` of each: ours
    turns entry `i` together with `i + turned/2`. In which order their products are summed up is all that changes."""

    def __init__(self, heads: int, turned: int):
        self.heads, self.turned = heads, turned

    def into(self, theirs: Tensor) -> tuple[Tensor, ...]:
        heads = theirs.unflatten(0, (self.heads, -1))
        parts = heads[:, : self.turned : 2], heads[:, 1 : self.turned : 2], heads[:, self.turned :]
        return (torch.cat(parts, dim=1).flatten(0, 1),)

    def back(self, ours: tuple[Tensor, ...], like: Tensor) -> Tensor:
        heads = ours[0].unflatten(0, (self.heads, -1))
        pairs = heads[:, : self.turned].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return torch.cat((pairs, heads[:, self.turned :]), dim=1).flatten(0, 1)


class Transposed(Transform):
    """Stored (in, out), as GPT-2's layers are; a bias stays as it is."""

    def into(self, theirs: Tensor) -> tuple[Tensor, ...]:
        return (theirs.t(),)

    def back(self, ours: tuple[Tensor, ...], like: Tensor) -> Tensor:
        return ours[0].t()


class Fused(Transposed):
    """Queries, keys and values in one matrix (in, 3 · out)."""

    def into(self, theirs: Tensor) -> tuple[Tensor, ...]:
        return theirs.t().chunk(3)

    def back(self, ours: tuple[Tensor, ...], like: Tensor) -> Tensor:
        return torch.cat(ours).t()


class OneRow(Transform):
    """A vector stored as a matrix of one row, (1, V)."""

    def into(self, theirs: Tensor) -> tuple[Tensor, ...]:
        return (theirs[0],)

    def back(self, ours: tuple[Tensor, ...], like: Tensor) -> Tensor:
        return ours[0][None]


class SinusoidTable(Transform):
    """A table that ours computes."""

    def into(self, theirs: Tensor) -> tuple[Tensor, ...]:
        return ()

    def back(self, ours: tuple[Tensor, ...], like: Tensor) -> Tensor:
        rows, width = like.shape
        return SinusoidalPositions(width, in_halves=True)(torch.arange(rows)[None])[0].to(like.dtype)


class Row(NamedTuple):
    """A module, whose weight and bias are named alike on both sides, or a single parameter.

    `{layer}` stands for the number of a layer. A transform may depend on our configuration. Where two rows give the
    same parameter of ours, the first one that the source has is taken; backwards both are filled.
    """

    theirs: str
    ours: str | tuple[str, ...]
    transform: Transform | Callable[[Any], Transform] = Transform()

    def our_names(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours


class Link(NamedTuple):
    """A row with its prefixes and the number of a layer in place."""

    theirs: str
    ours: tuple[str, ...]
    transform: Transform


class Step(NamedTuple):
    """How one parameter of the target comes about: from these parameters of the source."""

    inputs: tuple[str, ...]
    apply: Callable[[tuple[Tensor, ...]], Tensor]


# Options


class Field(NamedTuple):
    """An option of theirs and the one of ours that it sets. The functions are given the value and all options of the
    side it comes from, and raise a `KeyError` that holds the values they know."""

    theirs: str
    ours: str
    into: Callable[[Any, Mapping[str, Any]], Any] = lambda value, _: value
    back: Callable[[Any, Mapping[str, Any]], Any] = lambda value, _: value


def same(*names: str) -> tuple[Field, ...]:
    return tuple(Field(name, name) for name in names)


def chosen(theirs: str, ours: str, values: Mapping[Any, Any]) -> Field:
    """{their value: ours}; of two values of theirs that mean the same, the first is written."""
    inverse = {value: key for key, value in reversed(list(values.items()))}

    def look_up(table: Mapping[Any, Any]) -> Callable[[Any, Mapping[str, Any]], Any]:
        def function(value: Any, _: Mapping[str, Any]) -> Any:
            if value not in table:
                raise KeyError(*table)
            return table[value]

        return function

    return Field(theirs, ours, look_up(values), look_up(inverse))


class OneOf(tuple):
    """Several values of an option that a family can live with; reading it gives the first."""


class Requirement(NamedTuple):
    """What an option must be, in words, and as a function of its value and all options of its side."""

    right: str
    holds: Callable[[Any, Mapping[str, Any]], bool]


def only(*values: Any) -> Requirement:
    return Requirement(" or ".join(map(repr, values)), lambda value, _: value in values)


def every(value: Any) -> Requirement:
    return Requirement(f"{value!r} in every layer", lambda values, _: not values or set(values) == {value})


# Options of ours that do nothing once a model is trained: they are converted if the family has them, and never stand in
# the way.
TRAINING_ONLY = {
    "initialization",
    "initializer_range",
    "mup_base_width",
    "train_padding_embedding",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "classifier_dropout",
}
LANGUAGE_MODELS = ("MaskedLM", "CausalLM", "ConditionalGeneration")
CLASSIFIERS = ("SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice")
# The tasks whose models have the part that an option describes; every model has the others.
PARTS = {
    "lm_head_bias": LANGUAGE_MODELS,
    "lm_head_transform": ("MaskedLM",),
    "lm_head_transform_bias": ("MaskedLM",),
    "classifier_bias": CLASSIFIERS,
    "pooler_act": ("", "SequenceClassification", "MultipleChoice"),
}
# Where a family says nothing else, blocks are all of one kind.
ONE_KIND = {
    "layer_types": lambda config: ["full_attention"] * config.num_hidden_layers,
    "encoder_layer_types": lambda config: ["full_attention"] * config.encoder_layers,
    "decoder_layer_types": lambda config: ["full_attention"] * config.decoder_layers,
}
# What transformers itself keeps in every configuration and means the same everywhere.
COMMON_FIELDS = same("id2label", "label2id", "problem_type", "dtype")
COMMON_NAMES = {option.theirs for option in COMMON_FIELDS}
# What it writes anew on every save.
BOOKKEEPING = {"architectures", "auto_map", "_name_or_path", "model_type", "transformers_version"}


@dataclass(frozen=True)
class Head:
    """A task in a family: the class that does it there, and what only this class has."""

    native: str
    rows: tuple[Row, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    fields: tuple[Field, ...] = ()


@dataclass(frozen=True)
class Family:
    """A native architecture.

    Args:
        native: its `model_type`.
        config: our configuration for it.
        rows: parameters of the backbone, without the prefix they have below a head.
        heads: by task.
        fields: options that both sides have.
        constants: our options that are always the same in this family: a value, `OneOf` several, or a function of our
            configuration. What neither `fields` nor `constants` name must have our default.
        requires: options of theirs that have no counterpart here, and what they must be.
        written: those of them whose default is another: values, or functions of our configuration.
        taken_as: classes of transformers with a head that has no counterpart here, and the task of what is left.
        left_out: beginnings of parameters of such heads.
        has_prefix: whether its parameters stand below a backbone where there is a head.
        parts: configurations within theirs, whose options are named with them, `"encoder.hidden_size"`.
        saved_as: beginnings of parameters that transformers calls otherwise in files than in models.
    """

    native: str
    config: type[ScratchConfig]
    rows: tuple[Row, ...]
    heads: Mapping[str, Head]
    fields: tuple[Field, ...]
    constants: Mapping[str, Any]
    requires: Mapping[str, Requirement] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    taken_as: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    saved_as: Mapping[str, str] = field(default_factory=dict)
    has_prefix: bool = True
    parts: tuple[str, ...] = ()

    def our_class(self, task: str) -> type[ScratchPreTrainedModel]:
        kind = self.config.__name__.removesuffix("Config")
        return getattr(hf_scratch_transformer, f"{kind}For{task}" if task else f"{kind}Model")

    def native_class(self, task: str) -> type[PreTrainedModel]:
        return getattr(transformers, self.heads[task].native)

    def name_in_files(self, name: str) -> str:
        """Of a parameter of theirs."""
        for now, then in self.saved_as.items():
            if name.startswith(now):
                return then + name.removeprefix(now)
        return name

    def fields_of(self, task: str) -> tuple[Field, ...]:
        return self.fields + self.heads[task].fields + COMMON_FIELDS

    # Configurations

    def config_into(self, theirs: PreTrainedConfig, task: str) -> ScratchConfig:
        """Our configuration for theirs. What it cannot express is kept in `converted_from`, for the way back.

        Raises:
            ValueError: one message with every option of theirs that has no counterpart, and what it would have to be.
        """
        options = self.options_of(theirs)
        ours = self.options_into(options, task)
        constants = {**self.constants, **self.heads[task].constants}
        for name, value in constants.items():
            if not callable(value):
                ours.setdefault(name, value[0] if isinstance(value, OneOf) else value)
        config = self.config(**ours)
        expressed = self.options_of(self.config_back(config, task))
        rest = {name: value for name, value in options.items() if expressed.get(name) != value}
        kept = {name: value for name, value in rest.items() if name not in BOOKKEEPING}
        config.converted_from = {"model_type": self.native, **kept}
        return config

    def options_of(self, config: PreTrainedConfig) -> dict[str, Any]:
        """Those of the configurations within it as `part.name`."""
        options = config.to_dict()
        for part in self.parts:
            options |= {f"{part}.{name}": value for name, value in options.pop(part).items()}
        return options

    def native_config(self, options: Mapping[str, Any]) -> PreTrainedConfig:
        parts: dict[str, dict[str, Any]] = {part: {} for part in self.parts}
        whole = {}
        for name, value in options.items():
            part, _, within = name.partition(".")
            if within:
                parts[part][within] = value
            else:
                whole[name] = value
        return transformers.AutoConfig.for_model(self.native, **copy.deepcopy(whole), **copy.deepcopy(parts))

    def options_into(self, theirs: Mapping[str, Any], task: str) -> dict[str, Any]:
        wrong = [
            f"{name}={theirs[name]!r} must be {requirement.right}"
            for name, requirement in self.requires.items()
            if name in theirs and not requirement.holds(theirs[name], theirs)
        ]
        ours: dict[str, Any] = {}
        origin: dict[str, str] = {}
        for option in self.fields_of(task):
            if option.theirs not in theirs:
                continue
            try:
                value = option.into(theirs[option.theirs], theirs)
            except KeyError as error:
                wrong.append(
                    f"{option.theirs}={theirs[option.theirs]!r} must be one of {', '.join(map(repr, error.args))}"
                )
                continue
            if ours.setdefault(option.ours, value) != value and option.ours not in TRAINING_ONLY:
                first = origin[option.ours]
                wrong.append(f"{option.theirs}={theirs[option.theirs]!r} must go with {first}={theirs[first]!r}")
            origin.setdefault(option.ours, option.theirs)
        if wrong:
            raise ValueError(f"this {self.native} model has options that have no counterpart here: {'; '.join(wrong)}")
        return ours

    def config_back(self, ours: ScratchConfig, task: str) -> PreTrainedConfig:
        """Their configuration for ours.

        Raises:
            ValueError: one message with every option of ours that stands in the way, and what it would have to be.
        """
        own = {option.name for option in fields(ours)} - {option.name for option in fields(PreTrainedConfig)}
        options = {name: getattr(ours, name, None) for name in own | {option.ours for option in COMMON_FIELDS}}
        options = copy.deepcopy(options)  # configurations of transformers write into what they are given
        if options["attention_output_bias"] is None:
            options["attention_output_bias"] = options["attention_bias"]
        theirs, wrong = self.options_back(options, task)
        wrong += self.in_the_way(ours, options, task)
        refused = f"{type(ours).__name__} cannot become {self.native}"
        if wrong:
            raise ValueError(f"{refused}: {'; '.join(wrong)}")
        theirs |= {name: value(ours) if callable(value) else value for name, value in self.written.items()}
        with reading(refused):
            config = self.native_config(theirs)
            rope, filled_in = theirs.get("rope_parameters") or {}, getattr(config, "rope_parameters", None) or {}
            if "partial_rotary_factor" in filled_in.keys() - rope.keys():
                theirs["rope_parameters"] = rope | {"partial_rotary_factor": 1.0}
                config = self.native_config(theirs)
            held = self.options_of(config)
            meaning = self.options_into(held, task)  # refuses what theirs has but does not look at
        changed = [name for name in theirs.keys() - COMMON_NAMES if not is_same(theirs[name], held.get(name))]
        if changed:
            what = "; ".join(f"{name}={theirs[name]!r} would be {held.get(name)!r}" for name in sorted(changed))
            raise ValueError(f"{refused}: {what}")
        kept = getattr(ours, "converted_from", None) or {}
        if kept.get("model_type") == self.native:
            rest = {name: value for name, value in sorted(kept.items()) if name not in BOOKKEEPING}
            for some in (rest, *({name: value} for name, value in rest.items())):
                # Only what still means the same, all of it or each alone: the options may have been changed since.
                trial = self.native_config(theirs | some)
                if self.options_into(self.options_of(trial), task) == meaning:
                    theirs, config = theirs | some, trial
        return config

    def options_back(self, ours: Mapping[str, Any], task: str) -> tuple[dict[str, Any], list[str]]:
        theirs: dict[str, Any] = {}
        wrong = []
        for option in self.fields_of(task):
            if option.ours not in ours:
                continue
            try:
                value = option.back(ours[option.ours], ours)
            except KeyError as error:
                wrong.append(f"{option.ours}={ours[option.ours]!r} must be one of {', '.join(map(repr, error.args))}")
                continue
            if theirs.setdefault(option.theirs, value) != value:
                wrong.append(
                    f"{option.ours}={ours[option.ours]!r} would be {option.theirs}={value!r}, "
                    f"which other options make {theirs[option.theirs]!r}"
                )
        return theirs, wrong

    def in_the_way(self, config: ScratchConfig, options: Mapping[str, Any], task: str) -> Iterator[str]:
        defaults = {option.name: option.default for option in fields(config)}
        constants = {**ONE_KIND, **self.constants, **self.heads[task].constants}
        for name in sorted(options.keys() - TRAINING_ONLY - {option.ours for option in self.fields_of(task)}):
            if task not in PARTS.get(name, (task,)):
                continue
            right = constants.get(name, defaults[name])
            if callable(right):
                right = right(config)
            accepted = right if isinstance(right, OneOf) else OneOf([right])
            if options[name] not in accepted:
                yield f"{name}={options[name]!r} must be {' or '.join(map(repr, accepted))}"

    # Parameters

    def links(self, task: str, config: ScratchConfig) -> list[Link]:
        """The rows of a model."""
        depth = max(getattr(config, name, 0) for name in ("num_hidden_layers", "encoder_layers", "decoder_layers"))
        their_prefix = f"{self.native_class(task).base_model_prefix}." if task and self.has_prefix else ""
        our_prefix = "model." if task else ""
        rows = [(row, their_prefix, our_prefix) for row in self.rows] + [(row, "", "") for row in self.heads[task].rows]
        return [
            Link(
                (theirs + row.theirs).replace("{layer}", str(layer)),
                tuple((ours + name).replace("{layer}", str(layer)) for name in row.our_names()),
                row.transform if isinstance(row.transform, Transform) else row.transform(config),
            )
            for row, theirs, ours in rows
            for layer in range(depth if "{layer}" in row.theirs else 1)
        ]


def steps_into(links: Sequence[Link], targets: Iterable[str], available: Container[str]) -> dict[str, Step]:
    """How each parameter of ours in `targets` comes about from those of theirs that are available."""

    def step(name: str) -> Step:
        for link in links:
            for index, ours in enumerate(link.ours):
                leaf = leaf_of(name, ours)
                if leaf is not None and link.theirs + leaf in available:
                    return Step((link.theirs + leaf,), partial(link.transform.part, index=index))
        raise LookupError(f"no row gives {name}")

    return {name: step(name) for name in targets}


def steps_back(links: Sequence[Link], targets: Mapping[str, Tensor]) -> dict[str, Step]:
    """How each parameter of theirs in `targets` comes about from ours."""

    def step(name: str, like: Tensor) -> Step:
        for link in links:
            leaf = leaf_of(name, link.theirs)
            if leaf is not None:
                return Step(tuple(ours + leaf for ours in link.ours), partial(link.transform.back, like=like))
        raise LookupError(f"no row gives {name}")

    return {name: step(name, like) for name, like in targets.items()}


def is_same(given: Any, held: Any) -> bool:
    """Whether a configuration holds an option as it was given; it may have added to a dictionary."""
    if not isinstance(given, dict) or not isinstance(held, dict):
        return given == held
    return all(is_same(value, held.get(name)) for name, value in given.items())


def leaf_of(name: str, module: str) -> str | None:
    """`".weight"`, `".bias"`, or `""` where a row names the parameter itself; `None` if it is not of this module."""
    leaf = name.removeprefix(module)
    return leaf if name.startswith(module) and leaf in ("", ".weight", ".bias") else None
