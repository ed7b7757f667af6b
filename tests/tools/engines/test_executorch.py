"""ExecuTorch, by the exporter of transformers."""

import pytest
import torch

from hf_scratch_transformer import ScratchEncoderForMaskedLM
from tests import tiny


def test_encoder(tmp_path):
    """an encoder, exported by transformers for XNNPACK, opened again: masked-LM logits = ours within 1e-4"""
    try:
        from transformers.exporters import ExportedModel
        from transformers.exporters.exporter_executorch import ExecutorchConfig, ExecutorchExporter
    except (ImportError, OSError) as error:
        pytest.skip(str(error).splitlines()[0][:200])
    model = tiny.model(ScratchEncoderForMaskedLM)
    traced, inputs = (tiny.inputs(model, 3, 7, seed=seed) for seed in (0, 1))
    exported = ExecutorchExporter().export(model, traced, config=ExecutorchConfig(backend="xnnpack"))
    exported.save_pretrained(tmp_path)
    theirs = ExportedModel.from_pretrained(tmp_path, trust_remote_code=True)(**inputs)
    with torch.no_grad():
        ours = model(**inputs)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(theirs.logits[real], ours.logits[real], rtol=0, atol=1e-4)
