"""Typed sections of a YAML file and of a command line: read by the types of their fields, checked whole, explained.

YAML gives structure and nothing else: what stands at a leaf is text, from the file as from the command line, and is
read by the type of its field. So a name keeps its characters (`no` is Norwegian), a number is the one that is written
(`010` is ten), and what does not fit its field is refused rather than taken for something else.
"""

import difflib
import json
import re
import shlex
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails


class RecipeError(ValueError):
    """A recipe, or the data it names, that cannot be run. The message is for the terminal, without a traceback."""


class Section(BaseModel):
    """Fields of a recipe that belong together. Those without a default have an example."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        return _read(value, cls.model_fields[str(info.field_name)].annotation)


Root = TypeVar("Root", bound=Section)


# --- Reading --------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML whose scalars are text, but for null; keys that are given again are noted."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.repeated: list[str] = []
        self.deep_construct = True  # refuses entries that hold themselves

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                self.repeated.append(f"line {key.start_mark.line + 1}: {key.value} is given a second time")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The entries of a recipe, their leaves as text, and a line for each key that is given twice.

    Raises RecipeError when the file holds none.
    """
    if not path.exists():
        raise RecipeError(f"{path}: there is no such recipe")
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        tree = loader.get_single_data()
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise RecipeError(f"{path}: cannot be read as a YAML recipe: {reason(error)}") from None
    if not isinstance(tree, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of keys to values, this file holds {shown(tree)}")
    return tree, loader.repeated


def override(tree: dict[str, Any], words: Sequence[str], root: type[Section]) -> Iterator[str]:
    """Put `--key value | --key=value | --flag ...` into the tree of a `root`; yields what is wrong with it."""
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("--"):
            yield f"{shown(word)}: not of the form --key value"
            continue
        key, separator, text = word[2:].partition("=")
        value: Any = text
        if not separator:
            if position < len(words) and not words[position].startswith("--"):
                value, position = words[position], position + 1
            else:
                value = True
        *parents, leaf = path = key.split(".")
        if value == "null" and _is_optional(_kind(root, path)):
            value = None
        node: Any = tree
        for parent in parents:
            node = node.setdefault(parent, {}) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node[leaf] = value
        else:
            yield f"--{key}: {'.'.join(parents)} holds one value, not a section"


def _read(value: Any, kind: Any) -> Any:
    """What was written, as the type of its field has it; what does not fit the type is left as it is."""
    kind = _required(kind)
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(value, str) and value[:1] in ("[", "{") and (origin or kind is Any or _is_section(kind)):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{shown(value)} is not JSON: {error}") from None
    if origin is tuple and value is not None:
        return tuple(_read(item, inner[0]) for item in (value if isinstance(value, list | tuple) else [value]))
    if isinstance(value, list) and kind is Any:
        return [_read(item, Any) for item in value]
    if isinstance(value, dict) and (origin is dict or kind is Any):
        return {key: _read(item, Any if kind is Any else inner[1]) for key, item in value.items()}
    if kind in (int, float, bool, Any):
        value = _literal(value) if isinstance(value, str) else value
        if kind is int and isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
            return int(value)
        if type(value) is int and abs(value) >= 2**63:  # no library takes more
            raise ValueError(f"must be below 2**63, got {value}")
    return value


def _literal(text: str) -> Any:
    """The truth value or the decimal number that is written; other text as it is."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"[-+]?\d+(_\d+)*", text):
        return int(text)
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text):
        return float(text)
    return text


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


# --- What is wrong, and what would be right -------------------------------------------------------------------------


def validated(root: type[Root], tree: dict[str, Any], hint: Callable[[str], str]) -> tuple[Root, list[str]]:
    """The instance that a tree describes, and what is wrong with it, a line for each mistake.

    Of a tree with mistakes the instance holds what is right: to ask it for a field that is wrong is an AttributeError.
    `hint` says what an unknown dotted key may have meant.
    """
    broken = [*_broken_keys(tree)]
    try:
        return root.model_validate(tree), broken
    except ValidationError as error:
        mistakes = error.errors()
        problems = broken + [_described(mistake, root, hint) for mistake in mistakes]
        return _sound(root, tree, [mistake["loc"] for mistake in mistakes]), problems


def _broken_keys(tree: Any, where: str = "") -> Iterator[str]:
    """Take the keys out of a tree that hold half a character, of which pydantic can say nothing; says it."""
    for key in list(tree) if isinstance(tree, dict) else ():
        if str(key).encode(errors="replace").decode() == str(key):
            yield from _broken_keys(tree[key], f"{where}{key}.")
        else:
            del tree[key]
            yield f"{where}{str(key)!a}: unknown key, which holds what is no character"


def _described(mistake: ErrorDetails, root: type[Section], hint: Callable[[str], str]) -> str:
    """One line: the field, what would be right, and what was given."""
    path, given = [str(part) for part in mistake["loc"]], mistake["input"]
    field, kind = ".".join(path), _kind(root, path)
    match mistake["type"]:
        case "extra_forbidden":
            return f"{field}: unknown key{hint(field)}"
        case "missing":
            return f"{field}: missing, must be {_words(kind)}"
        case "value_error":
            return f"{field}: {mistake['ctx']['error']}"
        case "literal_error":
            near = nearest(str(given), map(str, get_args(_required(kind))))
            return f"{field}: must be {_words(kind)}, got {shown(given)}{near}"
        case _:
            return f"{field}: must be {_words(kind)}, got {shown(given)}"


def _sound(kind: type[Any], tree: Mapping[str, Any], wrong: Sequence[tuple[int | str, ...]]) -> Any:
    entries, doubtful = {name: tree[name] for name in kind.model_fields if name in tree}, []
    for name in {str(path[0]) for path in wrong} & kind.model_fields.keys():
        inside, spec = [path[1:] for path in wrong if path[0] == name], kind.model_fields[name]
        if all(inside) and _is_section(spec.annotation) and isinstance(tree[name], dict):
            entries[name] = _sound(spec.annotation, tree[name], inside)
        else:
            doubtful.append(name)
            entries.pop(name, None)
            if spec.is_required():
                entries[name] = spec.examples[0]
    part = kind.model_validate(entries)
    for name in doubtful:
        del part.__dict__[name]
    return part


def _kind(root: type[Section], path: Sequence[str]) -> Any:
    """The type of a field, of an item of a list or of an entry of a mapping; Any where there is no such thing."""
    kind: Any = root
    for part in path:
        kind = _required(kind)
        if _is_section(kind):
            spec = kind.model_fields.get(part)
            kind = Annotated[spec.annotation, spec] if spec else Any
        else:
            kind = {tuple: get_args(kind)[:1], dict: get_args(kind)[1:]}.get(get_origin(kind), (Any,))[0]
    return kind


def _required(kind: Any) -> Any:
    """A type without its limits and without None."""
    while get_origin(kind) is Annotated or NoneType in get_args(kind):
        kind = get_args(kind)[0]
    return kind


def _is_optional(kind: Any) -> bool:
    inner = get_args(kind)
    return kind is Any or NoneType in inner or (get_origin(kind) is Annotated and _is_optional(inner[0]))


def _words(kind: Any, limits: Iterable[Any] = ()) -> str:
    """A type for the reader: `a number, at least 0 and below 1`."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _words(inner[0], [limit for each in inner[1:] for limit in getattr(each, "metadata", ())])
    if NoneType in inner:
        return f"{_words(inner[0], limits)}, or null"
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin is tuple:
        plain = f"a list {'' if Ellipsis in inner else f'of {len(inner)} '}({_words(inner[0])})"
    else:
        plain = PLAIN.get(origin or kind, "a section of fields")
    ranges = [
        text.format(getattr(limit, key)) for limit in limits for key, text in LIMITS.items() if hasattr(limit, key)
    ]
    return ", ".join(filter(None, [plain, " and ".join(ranges)]))


PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a mapping", Any: "text"}
LIMITS = {
    "ge": "at least {}",
    "gt": "above {}",
    "lt": "below {}",
    "min_length": "at least {} long",
    "max_length": "at most {} long",
}


def shown(value: Any) -> str:
    """A value as one would write it on the command line."""
    return shlex.quote(value) if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def reason(error: Exception) -> str:
    """What an error of a library says, on one line; of those not meant for a reader, with their class."""
    told = isinstance(error, ValueError | OSError | RuntimeError | yaml.YAMLError) and str(error)
    return " ".join((str(error) if told else f"{type(error).__name__}: {error}").split())


def names(kind: Any, prefix: str = "") -> Iterator[str]:
    """All fields of a section and of those inside it, dotted."""
    for name, spec in kind.model_fields.items():
        yield prefix + name
        if _is_section(spec.annotation):
            yield from names(spec.annotation, f"{prefix}{name}.")


def nearest(key: str, names: Iterable[str]) -> str:
    """A hint at what was probably meant: of the names in the same section, then of all, by their last part."""
    section, _, word = key.rpartition(".")
    names = list(names)
    for some in ([name for name in names if name.rpartition(".")[0] == section], names):
        by_word = {name.rpartition(".")[2]: name for name in reversed(some)}
        for near in difflib.get_close_matches(word, by_word, n=1):
            return f"; did you mean {by_word[near]}?"
    return ""


# --- The reference --------------------------------------------------------------------------------------------------


def reference(root: type[Section], width: int) -> str:
    """All fields in lines of `width` characters: what may be given, what holds otherwise, what it means."""
    sections: dict[str, Any] = {name: spec.annotation for name, spec in root.model_fields.items()}
    paragraphs = []
    for section, kind in {"": root, **sections}.items():
        if _is_section(kind):
            paragraphs += ["", f"{section or root.__name__.lower()}: {kind.__doc__}"]
            for name, spec in kind.model_fields.items():
                path = [section, name] if section else [name]
                default = "required" if spec.is_required() else f"default {shown(spec.get_default())}"
                if not _is_section(spec.annotation):
                    paragraphs += [f"  --{'.'.join(path)}", f"      {_words(_kind(root, path))}; {default}"]
                    paragraphs += [f"      {spec.description}"]
    return filled(paragraphs[1:], width)


def filled(paragraphs: Iterable[str], width: int) -> str:
    """Paragraphs in lines of `width` characters, each with the margin of its first line."""
    return "\n".join(
        textwrap.fill(text, width, subsequent_indent=" " * (len(text) - len(text.lstrip())), break_on_hyphens=False)
        for text in paragraphs
    )
