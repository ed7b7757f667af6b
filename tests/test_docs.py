"""The documents: names in them exist, links lead somewhere, the picture is that of the code, worked changes work."""

import ast
import builtins
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

import hf_scratch_transformer
from docs import draw_dataflow, write_tools
from hf_scratch_transformer.conversion.families import FAMILIES

ROOT = Path(__file__).parents[1]
READING, CONTRIBUTING = ROOT / "docs/READING.md", ROOT / "CONTRIBUTING.md"
ROOMS = ("hf_scratch_transformer", "training", "benchmarks", "demo", "docs")
TOP_LEVEL = [ROOT, *(ROOT / room for room in ROOMS), ROOT / "tests"]


# --- The picture ------------------------------------------------------------------------------------------------------


def test_picture_is_that_of_the_code():
    today = json.loads(draw_dataflow.structure(draw_dataflow.dataflow()))
    assert json.loads(draw_dataflow.drawn(draw_dataflow.PICTURE)) == today, "run `make pictures`, and look at it"


def test_lanes_differ_where_the_families_do():
    steps = {(step.owner, step.name): step for step in draw_dataflow.dataflow()}
    shared = {name for (_, name), step in steps.items() if set(step.shapes) == set(draw_dataflow.LANES)}
    assert shared >= {"check_inputs", "embeddings", "self_attn", "mlp", "norm"}
    assert set(steps["ScratchBlock.forward", "cross_attn"].shapes) == {"target"}


@pytest.mark.parametrize(
    ("first", "second", "merged"),
    [("ace", "abe", "acbe"), ("abc", "abc", "abc"), ("ab", "xby", "axby"), ("", "ab", "ab"), ("abd", "abc", "abdc")],
)
def test_merged_steps_keep_both_orders(first, second, merged):
    assert "".join(draw_dataflow.merge(list(first), second)) == merged


# --- Links, files and names -------------------------------------------------------------------------------------------


def without_code_blocks(document: Path) -> str:
    return re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)


def headings(document: Path) -> set[str]:
    """Their anchors, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", without_code_blocks(document), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "document", [path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))]
)
def test_links_lead_somewhere(document):
    path = ROOT / document
    for link in re.findall(r"\]\(([^)]+)\)", without_code_blocks(path)):
        if re.match(r"https?://", link):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        assert not anchor or anchor in headings(target), link


def test_the_tour_has_seven_stops_each_a_file_and_a_question():
    stops = re.split(r"^## ", READING.read_text(), flags=re.MULTILINE)[1:-1]
    assert [stop[:2] for stop in stops] == [f"{number}." for number in range(1, 8)]
    for stop in stops:
        title = stop.splitlines()[0]
        assert title.endswith("?"), title
        assert re.search(r"\]\(\.\./hf_scratch_transformer/\w+\.py\)", stop), title
        assert "\nTo change: " in stop, title


def mapped_files() -> list[Path]:
    """The paths of the map of the tree in CONTRIBUTING.md."""
    block = re.search(r"## The map of the tree\n+```\n(.*?)```", CONTRIBUTING.read_text(), re.DOTALL)[1]
    found, folders = [], [ROOT]
    for line in block.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        if depth > 2:
            continue  # the description of the line before
        del folders[depth + 1 :]
        names = re.split(r"\s{2,}", line.strip())[0].split(", ")
        found += [folders[-1] / name for name in names]
        if names[0].endswith("/"):
            folders.append(found[-1])
    return found


def test_every_file_on_the_map_exists():
    files = mapped_files()
    assert len(files) > 60
    assert [str(file.relative_to(ROOT)) for file in files if not file.exists()] == []


def test_every_source_file_is_on_the_map():
    there = {file for room in ROOMS for file in (ROOT / room).rglob("*.py") if file.name != "__init__.py"}
    assert sorted(str(file.relative_to(ROOT)) for file in there - set(mapped_files())) == []


@cache
def names_in_the_code() -> set[str]:
    """Whatever is defined, taken as an argument, set or written as text in our sources."""
    names: set[str] = set(dir(builtins))
    for room in ROOMS[:-1]:
        for file in (ROOT / room).rglob("*.py"):
            names.add(file.stem)
            for node in ast.walk(ast.parse(file.read_text())):
                for kind, field in (
                    (ast.ClassDef | ast.FunctionDef, "name"),
                    (ast.arg | ast.keyword, "arg"),
                    (ast.Name, "id"),
                    (ast.Attribute, "attr"),
                    (ast.alias, "name"),
                ):
                    if isinstance(node, kind):
                        names.add(getattr(node, field))
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 40:
                    names.add(node.value)
    return names


def exists(name: str) -> bool:
    """Of a file, a module, a class, a function, a method, a field, or a choice of one."""
    if "*" in name:
        return any(any(folder.glob(name)) for folder in TOP_LEVEL)
    if "/" in name or re.search(r"\.(py|md|yaml|yml|toml|lock|svg|json|jsonl|png)$", name):
        written_by_runs = ("model/", "tensorboard/", "recipe.yaml")
        return name in written_by_runs or any((folder / name).exists() for folder in TOP_LEVEL)
    first, *rest = name.split(".")
    modules = {"nn": torch.nn, "F": torch.nn.functional, "torch": torch}
    if not rest:
        return first in names_in_the_code() or hasattr(torch.nn, first) or hasattr(transformers, first)
    thing = modules.get(first, getattr(hf_scratch_transformer, first, None) or defined(first))
    if thing is None:
        return first in names_in_the_code() and all(part in names_in_the_code() for part in rest)
    for part in rest:
        thing = getattr(thing, part, None)
    return thing is not None


def defined(name: str) -> object:
    return next(
        (getattr(each, name) for each in list(sys.modules.values()) if is_ours(each) and name in vars(each)), None
    )


def is_ours(module: object) -> bool:
    return getattr(module, "__name__", "").startswith("hf_scratch_transformer.")


def test_a_name_that_is_nowhere_is_noticed():
    for name in (
        "ScratchStack.encode",
        "layers_scratch.py",
        "hidden_act",
        "F.cross_entropy",
        "_errors",
        "DynamicCache",
    ):
        assert exists(name), name
    for name in ("ScratchStack.encoded", "layer_scratch.py", "hiden_act", "F.cross_entropie", "training/lop.py"):
        assert not exists(name), name


@pytest.mark.parametrize("document", [READING, CONTRIBUTING], ids=lambda path: path.name)
def test_names_in_backticks_exist(document):
    quoted = re.findall(r"`([^`]+)`", without_code_blocks(document))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    missing = []
    for text in quoted:
        text = re.sub(r"\(\)$", "", text.replace("\n", " "))
        if make := re.fullmatch(r"make ([a-z-]+)", text):
            if make[1] not in targets:
                missing.append(text)
        elif module := re.match(r"python -m ([\w.]+)", text):
            if not (ROOT / module[1].replace(".", "/")).exists():
                missing.append(text)
        elif field := re.fullmatch(r"(\w+)=.*", text):  # with a value
            if not exists(field[1]):
                missing.append(text)
        elif re.fullmatch(r"[\w./*]+", text) and text not in OTHERS and not exists(text):
            missing.append(text)
    assert missing == []


# Words in backticks that are no names of ours.
OTHERS = {"**kwargs", "mypy", ".venv", "PIP_EXTRA_INDEX_URL"}


# --- Imports ----------------------------------------------------------------------------------------------------------


def test_imports_of_what_travels_run_one_way():
    """In the order that CONTRIBUTING gives; no family imports another."""
    order = [
        ["ops", "norms"],
        ["configuration"],
        ["unpadding", "cache", "generation"],
        ["layers"],
        ["stack"],
        ["heads"],
    ]
    assert " <- ".join(", ".join(names) for names in order) + " <- a family" in CONTRIBUTING.read_text()
    rank = {f"{name}_scratch": place for place, names in enumerate(order) for name in names}
    for file in (ROOT / "hf_scratch_transformer").glob("*_scratch*.py"):
        own = rank.get(file.stem, len(order))
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert rank[node.module] < own, (file.name, node.module)


# --- Worked changes ---------------------------------------------------------------------------------------------------


def worked_change(title: str) -> str:
    section = re.split(rf"^### {title}$", CONTRIBUTING.read_text(), flags=re.MULTILINE)[1]
    return re.search(r"```diff\n(.*?)```", section, re.DOTALL)[1]


def apply(diff: str, root: Path) -> None:
    """Make the edits of a diff without line numbers: what stands there must be there, once."""
    for part in re.split(r"^--- ", diff, flags=re.MULTILINE)[1:]:
        name, *hunks = re.split(r"\n@@\n", part.rstrip("\n"))
        file = root / name
        text = file.read_text()
        for hunk in hunks:
            lines = hunk.splitlines()
            before = "\n".join(line[1:] for line in lines if line[:1] != "+")
            after = "\n".join(line[1:] for line in lines if line[:1] != "-")
            assert text.count(before) == 1, f"{name} does not have this once:\n{before}"
            text = text.replace(before, after)
        file.write_text(text)


@pytest.fixture
def changed(tmp_path):
    """A copy of the package with a worked change, and how to run a program there."""

    def change(title: str):
        package = tmp_path / "hf_scratch_transformer"
        shutil.copytree(ROOT / package.name, package, ignore=shutil.ignore_patterns("__pycache__"))
        apply(worked_change(title), tmp_path)
        return package

    def run(program: str, *options: str) -> str:
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
        environment.pop("PYTHONPATH", None)
        command = [sys.executable, *options, "-c", textwrap.dedent(program)]
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return change, run


SIZES = "vocab_size=40, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=2"


def test_a_new_activation_trains_and_travels(changed):
    change, run = changed
    package = change("Add an activation")
    printed = run(
        f"""
        import torch
        import hf_scratch_transformer as scratch

        assert scratch.__file__.startswith({str(package)!r})
        torch.manual_seed(0)
        model = scratch.ScratchDecoderForCausalLM(scratch.ScratchDecoderConfig({SIZES}, hidden_act="celu"))
        mlp, x = model.model.layers[0].mlp, torch.randn(2, 3, 32)
        expected = mlp.down_proj(torch.nn.functional.celu(mlp.up_proj(x)))
        torch.testing.assert_close(mlp(x), expected)
        ids = torch.randint(3, 40, (4, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for _ in range(3):
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] > losses[1] > losses[2], losses
        model.eval().save_pretrained("saved")
        print(model(torch.arange(3, 11)[None]).logits.sum().item())
        try:
            scratch.ScratchDecoderConfig(hidden_act="cel")
        except ValueError as error:
            assert "'celu'" in str(error)
        """
    )
    # -I: without the working folder, so that the package cannot be what is imported.
    opened = run(
        f"""
        import torch, sys
        from transformers import AutoModelForCausalLM

        sys.path[:] = [path for path in sys.path if path != {str(ROOT)!r}]
        model = AutoModelForCausalLM.from_pretrained("saved", trust_remote_code=True)
        assert "hf_scratch_transformer" not in sys.modules
        assert model.config.hidden_act == "celu"
        print(model(torch.arange(3, 11)[None]).logits.sum().item())
        """,
        "-I",
    )
    assert float(opened) == pytest.approx(float(printed), rel=1e-5)


@pytest.mark.slow
def test_a_new_norm_placement_computes_its_formula(changed):
    change, run = changed
    package = change("Add a norm placement")
    run(
        f"""
        import torch
        import hf_scratch_transformer as scratch

        assert scratch.__file__.startswith({str(package)!r})
        torch.manual_seed(0)
        model = scratch.ScratchEncoderModel(scratch.ScratchEncoderConfig({SIZES}, norm_position="both")).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        ids = torch.randint(3, 40, (2, 7))
        x = model.embeddings(model.embeddings.word_embeddings(ids), torch.arange(7)[None])
        angles = model.rotary["full_attention"](torch.arange(7)[None], x.dtype)
        for layer in model.layers:
            attended = layer.self_attn(layer.self_attn_norm(x), position_embeddings=angles)[0]
            x = layer.self_attn_norm(x + attended)
            x = layer.mlp_norm(x + layer.mlp(layer.mlp_norm(x)))
        torch.testing.assert_close(model(ids).last_hidden_state, x)
        """
    )


def test_the_page_of_architectures_has_all_of_them():
    """With their heads, and how close ours is, which no test repeats."""
    page = (ROOT / "docs/ARCHITECTURES.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| `")
    ]
    heads = {family.native: ", ".join(task or "backbone" for task in family.heads) for family in FAMILIES.values()}
    assert {name.strip("`"): listed for name, listed, *_ in rows} == heads
    assert all(float(difference) <= 1e-5 * max(1, float(reach)) for *_, difference, reach in rows)
    assert f"weights of {len(FAMILIES)} native architectures" in (ROOT / "README.md").read_text()
    named = {option.strip("`") for _, _, options, *_ in rows for option in options.split(", ")}
    assert {"layer_types", "no_rope_layers", "partial_rotary_factor", "qk_norm_across_heads"} <= named


def test_the_page_of_tools_is_of_what_was_run():
    """Every test of a tool has a row, and the page says what came of it when they were run."""
    assert (ROOT / "docs/TOOLS.md").read_text() == write_tools.page()
    for folder in (path.parent for path in ROOT.glob("tests/tools/*/record.json")):
        recorded = {
            f"{row['run']}: {row['compared']}" for row in json.loads((folder / "record.json").read_text())["rows"]
        }
        for path in folder.glob("test_*.py"):
            for each in ast.parse(path.read_text()).body:
                if isinstance(each, ast.FunctionDef) and each.name.startswith("test_"):
                    assert " ".join(ast.get_docstring(each).split()) in recorded, f"{path}: {each.name}"
    assert {path.parent for path in ROOT.glob("tests/tools/*/requirements.lock")} == {
        path.parent for path in ROOT.glob("tests/tools/*/record.json")
    }, "a folder was never run"
