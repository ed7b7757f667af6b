"""How Sphinx makes pages of this project: `make docs`. Its sources are the tree itself, so that a link between Markdown
pages leads to the same place on GitHub and here.

The tutorials are the scripts of `examples/`. sphinx-gallery runs them, and writes pages with all that they print and
draw into the folder `tutorials`.
"""

import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from sphinx.application import Sphinx
from sphinx_gallery.scrapers import figure_rst
from transformers.utils import logging

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import hf_scratch_transformer  # noqa: E402

logging.disable_progress_bar()  # which would be printed on the pages

project = "hf_scratch_transformer"
release = hf_scratch_transformer.__version__
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/api/*.rst", "tutorials/*.rst", "*/*/README.md"]
exclude_patterns = [".*", "build", "dist", "runs", "data", "tests/first_version"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
]
nitpicky = True
# Their own pages are on the network, which a build does not ask for.
nitpick_ignore_regex = [("py:.*", r"(collections|huggingface_hub|os|pathlib|torch|transformers)\..*")]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # as on GitHub

html_theme = "furo"
html_title = f"Scratch Transformer {release}"
html_show_copyright = False
html_show_sourcelink = False

default_role = "code"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"

CONTENTS = """

```{toctree}
:hidden:
:caption: Learn

tutorials/index
docs/READING
```

```{toctree}
:hidden:
:caption: Refer

docs/RECIPES
docs/ARCHITECTURES
docs/SCALE
docs/TOOLS
docs/api/index
```

```{toctree}
:hidden:
:caption: Models
:glob:

model_cards/*/README
```

```{toctree}
:hidden:
:caption: Project

CONTRIBUTING
CHANGELOG
tests/conformance/README
```
"""


def figures(block: Any, variables: dict[str, Any], gallery: dict[str, Any]) -> str:
    """A picture of the figure that a cell has made: ours are no figures of pyplot, which would keep them all."""
    figure = variables["example_globals"].pop("figure", None)
    if not isinstance(figure, Figure):
        return ""
    path = next(variables["image_path_iterator"])
    figure.savefig(path, dpi=120, bbox_inches="tight")
    return figure_rst([path], gallery["src_dir"])


lesson = ["encoder.py", "decoder.py", "seq2seq.py", "native.py"].index

sphinx_gallery_conf = {
    "examples_dirs": "examples",
    "gallery_dirs": "tutorials",
    "filename_pattern": r"\.py$",
    "image_scrapers": "docs.conf.figures",  # by name: what can be written down is not built again in vain
    "within_subsection_order": "docs.conf.lesson",
    "capture_repr": (),
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_signature": False,
    "min_reported_time": 1e9,
    "write_computation_times": False,
}


def as_pages(app: Sphinx, page: str, source: list[str]) -> None:
    """The contents of the whole below the first page; links to scripts that are pages here, and to folders, which are
    none."""
    folder = Path(app.env.doc2path(page)).parent

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        if (folder / target).is_dir():
            return text
        if (folder / target).parent == ROOT / "examples":
            target = os.path.relpath(ROOT / "tutorials" / Path(target).with_suffix(".rst").name, folder)
        return f"[{text}]({target})"

    source[0] = re.sub(r"(?<!!)\[([^][]+)\]\(([\w./]+)\)", link, source[0])
    if page == app.config.root_doc:
        source[0] += CONTENTS


def begin(app: Sphinx, error: Exception | None) -> None:
    """Whoever opens the folder gets the first page."""
    if error is None:
        page = f'<meta http-equiv="refresh" content="0; url={app.config.root_doc}.html">\n'
        Path(app.outdir, "index.html").write_text(page)


def is_configuration(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, hf_scratch_transformer.ScratchConfig)


def fields(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """The fields of a configuration that its class adds, as they stand in the code: with default and comment."""
    if is_configuration(thing):
        found = re.findall(r"^(?:    # .*\n)*    [a-z]\w*: [^=\n]+ = .*$", inspect.getsource(thing), flags=re.MULTILINE)
        lines += ["", ".. code-block:: python", "", *"\n".join(found).splitlines(), ""]


def without_fields(app: Sphinx, what: str, name: str, thing: Any, *_: Any) -> tuple[str, None] | None:
    """They would all stand in the signature once more."""
    return ("(**fields)", None) if is_configuration(thing) else None


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", fields)
    app.connect("autodoc-process-signature", without_fields)
    app.connect("source-read", as_pages)
    app.connect("build-finished", begin)
