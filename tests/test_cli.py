"""The command: its help, and how bad input ends, whatever the subcommands are."""

import argparse
import sys
import types

import pytest

import training.__main__
from hf_scratch_transformer import cli


@pytest.fixture
def command(monkeypatch):
    """The command with one subcommand, `act`, that does what is set as its `does`."""
    module = types.ModuleType("hf_scratch_transformer.act")

    def add_commands(subparsers):
        parser = subparsers.add_parser("act", help="do it")
        parser.add_argument("--times", type=int, default=1)
        parser.set_defaults(run=lambda arguments: module.does(arguments))

    module.add_commands = add_commands
    module.does = lambda arguments: None
    monkeypatch.setitem(sys.modules, "hf_scratch_transformer.act", module)
    monkeypatch.setattr(cli, "MODULES", ("act",))
    return module


def test_a_subcommand_is_given_its_arguments(command):
    given = []
    command.does = given.append
    assert cli.main(["act", "--times", "3"]) == 0
    assert [arguments.times for arguments in given] == [3]


@pytest.mark.parametrize(
    "error", [ValueError("no such\n  thing"), OSError("no such thing"), FileNotFoundError("no such thing")]
)
def test_bad_input_is_one_line_and_code_2(command, capsys, error):
    def fail(arguments):
        raise error

    command.does = fail
    assert cli.main(["act"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "scratch-transformer: no such thing\n")


def test_a_mistake_of_ours_is_not_taken_for_bad_input(command):
    def fail(arguments):
        raise KeyError("a bug")

    command.does = fail
    with pytest.raises(KeyError):
        cli.main(["act"])


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--help"], 0, "do it"),
        (["act", "--help"], 0, "--times TIMES"),
        ([], 2, "required: COMMAND"),
        (["dance"], 2, "invalid choice: 'dance'"),
        (["act", "--times", "often"], 2, "invalid int value: 'often'"),
        (["act", "--tmies", "3"], 2, "unrecognized arguments: --tmies"),
    ],
)
def test_help_and_what_argparse_refuses(command, capsys, arguments, code, text):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert ended.value.code == code
    assert text in (err if code else out)


def test_every_module_named_adds_commands():
    subparsers = argparse.ArgumentParser().add_subparsers()
    for module in cli.MODULES:
        cli.importlib.import_module(f"hf_scratch_transformer.{module}").add_commands(subparsers)
    assert {"inspect", "plot", "senses"} <= subparsers.choices.keys()
    for parser in subparsers.choices.values():
        is_group = any(isinstance(action, argparse._SubParsersAction) for action in parser._actions)
        assert is_group or callable(parser.get_default("run"))


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["train", "recipe.yaml", "--data.path", "x", "--resume"], ["recipe.yaml", "--data.path", "x", "--resume"]),
        (["train", "--help"], ["--help"]),
        (
            ["evaluate", "model", "--data", "x", "--data.window=3"],
            ["evaluate", "model", "--data", "x", "--data.window=3"],
        ),
        (["evaluate"], ["evaluate"]),
        (["prepare", "recipe.yaml", "--data.path=x"], ["prepare", "recipe.yaml", "--data.path=x"]),
    ],
)
def test_the_words_of_training_reach_it_as_they_are(words, given, monkeypatch):
    received = []
    monkeypatch.setattr(training.__main__, "command", received.append)
    assert cli.main(words) == 0
    assert received == [given]


def test_what_training_needs_and_is_not_installed_is_named(monkeypatch, capsys, forget):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    forget("training.")
    assert cli.main(["train", "recipe.yaml"]) == 2
    assert "train needs accelerate: pip install 'hf-scratch-transformer[training]'" in capsys.readouterr().err
