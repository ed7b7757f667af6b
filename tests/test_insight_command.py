"""`scratch-transformer inspect`: tables for people, JSON for machines, one line for what is wrong."""

import json
import re
import subprocess
import sys

import pytest

from hf_scratch_transformer import cli
from hf_scratch_transformer.insight import sizes
from tests import tiny


@pytest.fixture
def inspect(monkeypatch, capsys):
    monkeypatch.setattr(cli, "MODULES", ("insight.command",))

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["inspect", *arguments])
        return code, *capsys.readouterr()

    return run


def test_the_tables_of_the_base_model(inspect):
    code, out, err = inspect("attention-is-all-you-need-base", "--source-length", "30", "--target-length", "20")
    assert (code, err) == (0, "")
    lines = [" ".join(line.replace("│", "|").split()) for line in out.splitlines()]
    for line in (
        "d_m = 512, h = 8, d_k = 64, d_v = 64, d_ff = 2,048, P = 512, V = 37,000, B = 1, T_E = 30, T_D = 20",
        "| model.decoder.layers.*.cross_attn | 6 | 2·h·d_m·d_k + h·d_m·d_v + h·d_v·d_m "
        "| 1,048,576 | 6,291,456 | 150 | yes |",
        "| the articles' formulas, in the layers | | | | 44,070,912 | | |",
        "| + token tables and head, tied ones once | | | | 18,944,000 | | |",
        "| + self_attn_norm | | | | 12,288 | | |",
        "| all | | | | 63,045,632 | 501 in the articles | |",
        "| model.encoder.layers.*.mlp.up_proj | 6 | input 1 × 30 × 512 | weight 2048 × 512 | 1 × 30 × 2048 "
        "| 62,914,560 | 2·B·T_E·d_m·d_ff |",
    ):
        assert line in lines
    assert "weights 1 × 8 × 20 × 30" in out  # of attention from the target to the source


def test_a_native_model_has_no_column_for_the_articles_and_a_biased_one_of_ours_names_them(inspect, tmp_path):
    tiny.config("decoder", attention_bias=True, hidden_act="swiglu").save_pretrained(tmp_path / "ours")
    _, out, _ = inspect(str(tmp_path / "ours"))
    assert "self_attn: biases" in out and "mlp: gate_proj" in out and "in the articles" in out
    assert "Attention Is All You Need" in out
    (tmp_path / "config.json").write_text('{"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 48}')
    code, out, _ = inspect(str(tmp_path / "config.json"), "--length", "9")
    assert code == 0 and "BertForMaskedLM" in out and "in the articles" not in out


def test_options_reach_the_report(inspect, tmp_path):
    config = tiny.config("seq2seq")
    config.save_pretrained(tmp_path)
    options = ["--batch", "3", "--length", "7", "--source-length", "5", "--dtype", "bfloat16", "--optimizer", "muon"]
    code, out, err = inspect(
        str(tmp_path), *options, "--attention", "eager", "--checkpointing", "--loss-only", "--json"
    )
    assert (code, err) == (0, "")
    expected = sizes.inspect(tmp_path, 3, 7, 5, "bfloat16", "eager", "muon", True, True)
    assert json.loads(out) == json.loads(json.dumps(expected.to_dict()))
    _, out, _ = inspect(str(tmp_path), "--checkpointing")
    assert "with checkpointing" in out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["llama-3-70"],
            "llama-3-70: neither a preset, nor a file, nor a folder; did you mean the preset 'llama-3-70b'?",
        ),
        (["."], "no config.json in this folder"),
        (["gpt-2", "--length", "2000"], "length=2000 is longer than max_position_embeddings=1024 of this model"),
        (["gpt-2", "--source-length", "20"], "source_length=20: scratch_decoder has no source; give length alone"),
        (["gpt-2", "--optimizer", "lion"], "optimizer='lion' must be one of adamw, muon"),
    ],
)
def test_what_is_wrong_is_one_line(inspect, arguments, complaint, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, err = inspect(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert complaint in err


NATIVE = {"model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"hidden_size": "wide"}, "config.json: .*'hidden_size'.*'wide'"),
        ({"dropout": None}, "config.json: .*'dropout'"),
        ({"rope_parameters": 3}, "config.json: .*'rope_parameters'"),
        ({"architectures": 1}, "config.json: architectures=1 must be a list of names"),
        ({"model_type": [1]}, r"config.json: model_type=\[1\] is not known"),
        (
            NATIVE | {"encoder_attention_heads": 0},
            "bart with encoder_attention_heads=0 does not work: ZeroDivisionError",
        ),
        (NATIVE | {"activation_dropout": None}, "bart with activation_dropout=None does not work: TypeError"),
        (NATIVE | {"d_model": 7}, "bart with d_model=7 does not work: .*divisible"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_by_its_field(inspect, tmp_path, fields, complaint):
    """Types are checked by transformers' base class, which raises another kind; native models check little else."""
    tiny.config("decoder").save_pretrained(tmp_path)
    saved = {} if fields.get("model_type") == "bart" else json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(saved | fields))
    code, out, err = inspect(str(tmp_path), "--length", "5")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(complaint, err)


@pytest.mark.slow
def test_70_billion_parameters_take_little_memory_and_no_matplotlib():
    program = """
import resource, sys
from hf_scratch_transformer import cli
cli.MODULES = ("insight.command",)
code = cli.main(["inspect", "llama-3-70b", "--json"])
assert "matplotlib" not in sys.modules
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert report["parameters"] == 70_553_706_496
    assert report["memory"]["weights"] == 2 * report["parameters"]
    assert int(done.stderr) < 1_000_000  # KiB
