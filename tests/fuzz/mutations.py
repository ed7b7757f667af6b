"""What people hand over by mistake: trees of settings with odd entries, files that were damaged."""

import copy
from typing import Any

from hypothesis import strategies as st

ODD: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 7, 40, 2**31, 2**64, -0.5, 0.1, 1.5, 1e308, float("inf"), float("nan")),
    *(
        "",
        " ",
        "0",
        "no",
        "null",
        "nan",
        "x",
        "adamw",
        "../x",
        "a\x00b",
        "ü🙂\ud800",
        "x" * 3000,
        "[1",
        "{}",
        "#",
        "~x",
    ),
    *([], [1], [None], ["x", 2], [[]], {}, {"a": 1}, {"": None}),
)
DEPTHS = ("layer", "n_layer", "depth", "block", "workers")  # a number of what is built one by one, even without data


def odd(name: str = "") -> st.SearchStrategy[Any]:
    """A value that may not fit a field of this name; nothing that would only take long."""
    values = [v for v in ODD if not (type(v) is int and v > 100 and any(part in name for part in DEPTHS))]
    return st.sampled_from(values).map(copy.deepcopy) | st.text(max_size=8)  # copies: what is drawn is changed again


def _places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = list(tree) if isinstance(tree, dict) else range(min(len(tree), 20)) if isinstance(tree, list) else []
    return [place for key in keys for place in [(*path, key), *_places(tree[key], (*path, key))]]


@st.composite
def changed(draw: Any, tree: Any, most: int = 3) -> tuple[Any, list[str]]:
    """A tree of JSON with up to `most` entries replaced, left out, added or renamed, and the names of those."""
    tree, names = copy.deepcopy(tree), []
    for _ in range(draw(st.integers(1, most))):
        if not (places := _places(tree)):
            break
        *parents, key = draw(st.sampled_from(places))
        node = tree
        for parent in parents:
            node = node[parent]
        names += [str(step) for step in (*parents, key)]
        match draw(st.sampled_from(["replace"] * 5 + ["leave out", "add", "rename", "swap"])):
            case "replace":
                node[key] = draw(odd(str(key)))
            case "leave out":
                del node[key]
            case "add" if isinstance(node, dict):
                added = draw(st.sampled_from(["x", "hidden_sizes", "", "ü", f"{key}s"]))
                node[added] = draw(odd(added))
                names.append(added)
            case "rename" if isinstance(node, dict):
                renamed = draw(st.sampled_from([f"{key}_", str(key).upper(), str(key)[:-1]]))
                node[renamed] = node.pop(key)
                names.append(renamed)
            case _:
                *others, other = draw(st.sampled_from(places))
                taken = tree
                try:
                    for step in (*others, other):
                        taken = taken[step]
                    node[key] = copy.deepcopy(taken)
                except (KeyError, IndexError, TypeError):  # gone, by an earlier change
                    pass
    return tree, names


@st.composite
def damaged(draw: Any, content: bytes) -> bytes:
    """The bytes of a file after an accident."""
    place = draw(st.integers(0, max(0, len(content) - 1)))
    match draw(
        st.sampled_from(["cut", "flip", "insert", "empty", "nul", "bom", "utf-16", "latin-1", "twice", "zeros"])
    ):
        case "cut":
            return content[:place]
        case "flip":
            return content[:place] + bytes([draw(st.integers(0, 255))]) + content[place + 1 :]
        case "insert":
            return content[:place] + draw(st.binary(min_size=1, max_size=20)) + content[place:]
        case "empty":
            return b""
        case "nul":
            return content[:place] + b"\0" * 16 + content[place:]
        case "bom":
            return b"\xef\xbb\xbf" + content
        case "utf-16":
            return content.decode("utf-8", "replace").encode("utf-16")
        case "latin-1":
            return content.decode("utf-8", "replace").encode("latin-1", "replace")
        case "twice":
            return content + content
        case _:
            return bytes(len(content))
