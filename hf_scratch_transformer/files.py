"""Files and folders that are written whole or not at all."""

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place for a file or a folder that takes the name of `path` once it is written; if that fails, nothing changes.

    It lies in a hidden folder of its own beside `path`, so that a rename suffices and no other process is in the way.

    Raises:
        OSError: that names `path`, whatever the library that writes makes of a full disk.
    """
    workshop = None
    try:
        workshop = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        yield workshop / path.name
        if path.is_dir():
            path.rename(workshop / "replaced by it")
        os.replace(workshop / path.name, path)
    except BaseException as error:
        if isinstance(error, OSError | SafetensorError) or type(error) is Exception:  # which tokenizers raises
            raise OSError(f"{path} cannot be written: {error}") from error
        raise
    finally:
        if workshop is not None:
            shutil.rmtree(workshop, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Replace a file in one go."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sweep(path: Path) -> None:
    """Delete what `replacing` left beside a path when the process was killed in it."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.{'[a-z0-9_]' * 8}"):
        shutil.rmtree(left)


def remove(path: Path) -> None:
    """Delete a file, a folder or a link, which may not be there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
