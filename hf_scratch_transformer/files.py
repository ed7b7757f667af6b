"""Files and folders that are written whole or not at all, and read with a line on what is wrong with them."""

import errno
import glob
import hashlib
import os
import shutil
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from huggingface_hub.utils import HFValidationError, validate_repo_id
from safetensors import SafetensorError

REASON = 600  # characters of what a library says


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


@contextmanager
def reading(source: str | os.PathLike[str]) -> Iterator[None]:
    """Within it, a library reads what somebody else wrote: whatever it raises becomes one `ValueError`, which names the
    source. Only calls of libraries belong here, lest a mistake of ours be taken for one of the source.
    """
    try:
        yield
    except BaseException as error:
        # A panic of a library in Rust is no `Exception`; its class cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        plain = isinstance(error, ValueError | OSError) and str(error)
        reason = str(error) if plain else f"{type(error).__name__}: {error}"
        raise ValueError(f"{os.fspath(source)}: {textwrap.shorten(reason, REASON, placeholder=' ...')}") from error


def possible_path(text: str) -> str:
    """What names a file or a folder, or an id on the Hub, as it is; there need be nothing of that name.

    Raises ValueError for what no file can be called: with a zero byte, too long, in the home of an unknown user.
    """
    try:
        Path(text).expanduser().lstat()
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{text!r} is no path: {error}") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ValueError(f"{text[:60]!r}... is no path: of {len(text)} characters, one part is too long") from error
    return text


def new_folder(target: str | os.PathLike[str]) -> Path:
    """The path of a folder that is still to be written.

    Raises ValueError if there is something of that name.
    """
    if os.path.lexists(Path(target)):
        raise ValueError(f"{os.fspath(target)} exists already: name a new folder")
    return Path(target)


@contextmanager
def making(target: str | os.PathLike[str]) -> Iterator[Path]:
    """As `replacing`, for a new folder or file, with the folders above it that are not there yet; if it fails, they go.

    Raises:
        ValueError: if there is something of that name.
        OSError: as `replacing`.
    """
    path = new_folder(target)
    above = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            yield new
    except BaseException:
        for folder in above:
            with suppress(OSError):  # it was never made, or somebody else's file is in it by now
                folder.rmdir()
        raise


def write_text(path: Path, text: str) -> None:
    """Replace a file in one go."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sha256(path: Path) -> str:
    """Of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of weights in a model's folder, by its name; of what is no folder none."""
    return {path.name: sha256(path) for path in sorted(folder.glob("*.safetensors"))}


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


def is_repository_id(name: str) -> bool:
    """Whether a name that is no path here can be one on the Hub, `owner/name`, rather than a path that is mistaken."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1 and not Path(name).parent.is_dir()
