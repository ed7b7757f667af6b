"""What is written is there whole or not at all, and nothing else is touched."""

import os
import threading

import pytest
from safetensors import SafetensorError

from hf_scratch_transformer.files import making, reading, remove, replacing, write_text


@pytest.mark.parametrize(
    "failure", [OSError(28, "full"), SafetensorError("full"), Exception("full"), KeyboardInterrupt()]
)
def test_what_cannot_be_written_leaves_what_was_there(failure, tmp_path):
    """The third is what tokenizers raises."""
    for name in ("file", "folder"):
        path = tmp_path / name
        for content in ("old", "new"):
            with replacing(path) as temporary:
                if name == "folder":
                    temporary.mkdir()
                    temporary /= "file"
                temporary.write_text(content)
        with (
            pytest.raises(KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else OSError, match="full|^$"),
            replacing(path) as temporary,
        ):
            temporary.mkdir()
            raise failure
        assert (path / "file" if name == "folder" else path).read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_folders_above_what_could_not_be_written_go_again(tmp_path):
    (tmp_path / "there").mkdir()
    for parts in ("there/new", "there/a/b/new"):
        with pytest.raises(ValueError, match="no"), making(tmp_path / parts) as new:
            new.mkdir()
            raise ValueError("no")
    assert not any((tmp_path / "there").iterdir())
    with pytest.raises(ValueError, match="no"), making(tmp_path / "there/a/new"):
        (tmp_path / "there/a/mine").write_text("")
        raise ValueError("no")
    assert [path.name for path in (tmp_path / "there/a").iterdir()] == ["mine"]
    with making(tmp_path / "there/a/b/new") as new:
        new.write_text("all of it")
    assert (tmp_path / "there/a/b/new").read_text() == "all of it"
    with pytest.raises(ValueError, match="exists already"), making(tmp_path / "there/a/b/new"):
        pass


def test_nothing_is_there_before_all_of_it_is(tmp_path):
    with replacing(tmp_path / "folder") as temporary:
        temporary.mkdir()
        (temporary / "file").write_text("")
        assert not (tmp_path / "folder").exists()
    assert (tmp_path / "folder" / "file").exists()


def test_hidden_files_of_like_name_are_not_in_the_way(tmp_path):
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id").write_text("theirs")
    write_text(tmp_path / "ssh", "ours")
    assert (tmp_path / ".ssh" / "id").read_text() == "theirs"


def test_two_writers_at_once_leave_one_whole_file(tmp_path):
    def write(letter):
        for _ in range(50):
            write_text(tmp_path / "file", letter * 10_000)

    writers = [threading.Thread(target=write, args=(letter,)) for letter in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(set((tmp_path / "file").read_text())) == 1
    assert os.listdir(tmp_path) == ["file"]


def test_files_and_folders_are_as_open_to_others_as_any(tmp_path):
    (tmp_path / "plain").write_text("")
    write_text(tmp_path / "file", "")
    with replacing(tmp_path / "folder") as temporary:
        temporary.mkdir()
    (tmp_path / "other").mkdir()
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert (tmp_path / "folder").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_missing_place_is_named(tmp_path):
    with pytest.raises(OSError, match="nowhere/file cannot be written"):
        write_text(tmp_path / "nowhere" / "file", "")


def test_what_is_not_there_need_not_be_removed(tmp_path):
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    for name in ("folder", "file", "absent"):
        remove(tmp_path / name)
    assert not list(tmp_path.iterdir())


class PanicException(BaseException):
    """As libraries in Rust raise it."""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("a is\n wrong"), "source: a is wrong"),
        (OSError(), "source: OSError:"),
        (KeyError("a"), "source: KeyError: 'a'"),
        (Exception("invalid"), "source: Exception: invalid"),
        (PanicException("index out of bounds"), "source: PanicException: index out of bounds"),
        (ValueError("word " * 999), "source: word .* \\.\\.\\.$"),
    ],
)
def test_what_a_library_says_of_a_source_is_one_short_line(error, message):
    with pytest.raises(ValueError, match=message) as caught, reading("source"):
        raise error
    assert len(str(caught.value)) < 700


def test_a_keyboard_interrupt_is_no_fault_of_the_source():
    with pytest.raises(KeyboardInterrupt), reading("source"):
        raise KeyboardInterrupt
