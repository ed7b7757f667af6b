"""`scratch-transformer serve`: what keeps the page from being shown is one line, with or without Gradio."""

import socket
import sys
import types

import pytest

from hf_scratch_transformer import cli
from hf_scratch_transformer.insight import serve


@pytest.fixture
def command(monkeypatch, capsys):
    monkeypatch.setattr(cli, "MODULES", ("insight.serve",))

    def run(*words):
        code = cli.main(["serve", *map(str, words)])
        out, err = capsys.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1)
        return err

    return run


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def test_an_address_that_cannot_be_had_is_named(command, tmp_path, free_port):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--host 127.0.0.1 --port {port}: Address already in use" in command(tmp_path, "--port", port)
    assert f"--host 192.0.2.1 --port {free_port}: Cannot" in command(
        tmp_path, "--host", "192.0.2.1", "--port", free_port
    )


@pytest.mark.parametrize("port", [-1, 0, 65536])
def test_a_port_that_is_none(command, tmp_path, port):
    assert f"--port {port} must be from 1 to 65535" in command(tmp_path, f"--port={port}")


@pytest.mark.parametrize("library", ["gradio", "matplotlib"])
def test_a_missing_library_is_named_with_its_extra(command, monkeypatch, forget, tmp_path, free_port, library):
    if library != "gradio":
        pytest.importorskip("gradio")

    def find_spec(name, *_):
        if name == library:
            raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(sys, "meta_path", [types.SimpleNamespace(find_spec=find_spec), *sys.meta_path])
    forget(library, f"{serve.__package__}.p")
    message = command(tmp_path, "--port", free_port)
    assert f"serve needs {library}: pip install 'hf-scratch-transformer[serve]'" in message


def test_a_folder_without_a_model(command, tmp_path, free_port):
    pytest.importorskip("gradio")
    assert "no config.json in this folder" in command(tmp_path, "--port", free_port)
    assert "no such file or folder" in command(tmp_path / "absent", "--port", free_port)
