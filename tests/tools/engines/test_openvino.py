"""OpenVINO, on files that `scratch-transformer export --to onnx` has written."""

import openvino
import pytest

from . import files

EXACT = {"INFERENCE_PRECISION_HINT": "f32"}  # some processors would take less


def runner(file):
    compiled = openvino.Core().compile_model(file, "CPU", EXACT)
    names = [each.any_name for each in compiled.outputs]
    return lambda inputs: dict(zip(names, compiled(inputs).values(), strict=True))


@pytest.mark.parametrize("exported", ["encoder", "rotary encoder"], indirect=True)
def test_encoder(exported):
    """an encoder, its ONNX, 3 batches with padding on either side: masked-LM logits, or states, = ours within 1e-5"""
    files.compare_encoder(runner(exported.folder / "model.onnx"), exported.model)


@pytest.mark.parametrize("exported", ["decoder", "learned decoder"], indirect=True)
def test_decoder(exported):
    """a decoder, its ONNX with cache: logits of prompts padded on the left, and greedy tokens, = ours"""
    files.compare_decoder(runner(exported.folder / "model.onnx"), exported.model)


@pytest.mark.parametrize("exported", ["seq2seq"], indirect=True)
def test_translator(exported):
    """a translator, its three ONNX files: greedy tokens of padded sentences = ours"""
    files.compare_translator(lambda name: runner(exported.folder / f"{name}.onnx"), exported.model)
