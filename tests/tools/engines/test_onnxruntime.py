"""ONNX Runtime, on files that `scratch-transformer export --to onnx` has written."""

import json

import onnxruntime
import pytest
import torch

from hf_scratch_transformer import ScratchEncoderModel
from hf_scratch_transformer.cli import main
from hf_scratch_transformer.conversion import onnx
from tests import tiny

from . import files


def runner(file):
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))


@pytest.mark.parametrize("exported", ["encoder", "rotary encoder"], indirect=True)
def test_encoder(exported):
    """an encoder, 3 batches with padding on either side: masked-LM logits, or states, = ours within 1e-5"""
    files.compare_encoder(runner(exported.folder / "model.onnx"), exported.model)


@pytest.mark.parametrize("exported", ["decoder", "learned decoder", "window decoder"], indirect=True)
def test_decoder(exported):
    """a decoder, cache as inputs and outputs: logits of prompts padded on the left, greedy tokens, = ours"""
    files.compare_decoder(runner(exported.folder / "model.onnx"), exported.model)


@pytest.mark.parametrize("exported", ["seq2seq", "learned seq2seq", "seq2seq of two vocabularies"], indirect=True)
def test_translator(exported):
    """a translator in three files, cache as inputs and outputs: greedy tokens of padded sentences = ours"""
    files.compare_translator(lambda name: runner(exported.folder / f"{name}.onnx"), exported.model)


def test_refused(tmp_path, capsys, monkeypatch):
    """no model of ours, a folder that is there, a file that computes something else: refused in a line"""
    tiny.model(ScratchEncoderModel).save_pretrained(tmp_path / "ours")
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert/config.json").write_text(json.dumps({"model_type": "bert"}))
    traced = onnx._write_graph

    def another(graph, model, folder):
        model.get_input_embeddings().weight[5:] += 0.1
        traced(graph, model, folder)
        model.get_input_embeddings().weight[5:] -= 0.1

    monkeypatch.setattr(onnx, "_write_graph", another)
    for source, target, message in (
        ("bert", "new", "is a bert model; models of ours become onnx"),
        ("ours", "bert", "exists already"),
        ("ours", "new", "would compute something else"),
    ):
        capsys.readouterr()
        with torch.no_grad():
            assert main(["export", str(tmp_path / source), str(tmp_path / target), "--to", "onnx"]) == 2
        error = capsys.readouterr().err
        assert message in error.splitlines()[-1]
        assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".new*"))
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "new"), "--to", "onnx", "--no-verify"]) == 0
