"""ExecuTorch, on folders that `scratch-transformer export --to executorch` has written."""

import pytest
import torch
from transformers import PreTrainedModel

from hf_scratch_transformer import ScratchEncoderModel
from hf_scratch_transformer.cli import main
from tests import tiny

from . import files
from .conftest import ENDLESS, MODELS

LENGTH = 9  # of prompts


@pytest.fixture
def opened(request, tmp_path):
    """The model, and what opens its programs."""
    try:
        from transformers.exporters import ExportedModel
        from transformers.exporters.exporter_executorch import ExecutorchExporter  # noqa: F401
    except (ImportError, OSError) as error:
        pytest.skip(str(error).splitlines()[0])
    model_class, options = MODELS[request.param]
    model = tiny.model(model_class, **ENDLESS | options)
    model.save_pretrained(tmp_path / "ours")
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "new"), "--to", "executorch"]) == 0
    return model, lambda name: ExportedModel.from_pretrained(tmp_path / "new" / name)


@pytest.mark.parametrize("opened", ["encoder"], indirect=True)
def test_encoder(opened):
    """an encoder, 3 batches with padding on either side: masked-LM logits = ours within 1e-5"""
    model, program = opened
    encoder = program("model")

    def run(arrays):
        outputs = encoder(**{name: torch.from_numpy(each) for name, each in arrays.items()})
        return {name: each.numpy() for name, each in outputs.items()}

    files.compare_encoder(run, model)


def follow(model: PreTrainedModel, decoder, given: dict, ids: torch.Tensor, parts: tuple[int, ...]) -> list:
    """Tokens written greedily after a text that is read in parts."""
    seen, written = 0, []
    for part in (*parts, *[1] * (files.NEW - 1)):
        new = ids[:, seen : seen + part]
        logits = decoder(input_ids=new, cache_position=torch.tensor([seen]), **given)
        seen += part
        if seen >= ids.shape[1]:
            written.append(logits[:, -1:].argmax(-1))
            ids = torch.cat([ids, written[-1]], 1)
    return torch.cat(written, 1).tolist()[0]


@pytest.mark.parametrize("opened", ["decoder", "window decoder"], indirect=True)
def test_decoder(opened):
    """a decoder with its static cache, prompts whole and in parts: greedy tokens = ours"""
    model, program = opened
    decoder, prompts = program("model"), tiny.tokens(model.config.vocab_size, 3, LENGTH)
    ours = files.greedy(model, {"input_ids": prompts})[:, LENGTH:].tolist()
    assert len({tuple(row) for row in ours}) > 1
    for parts in ((LENGTH,), (4, 1, 4)):
        rows = prompts.split(1)
        assert [follow(model, decoder, {}, row, parts) for row in rows] == ours


@pytest.mark.parametrize("opened", ["seq2seq"], indirect=True)
def test_translator(opened):
    """a translator as two programs, with its static cache, sentences of 3 lengths: greedy tokens = ours"""
    model, program = opened
    encoder, decoder = program("encoder_model"), program("decoder_model")
    start, found = torch.tensor([[model.config.decoder_start_token_id]]), set()
    for length in (2, 9, 31):
        source = tiny.inputs(model, 1, length, padding=None, seed=length)["input_ids"]
        mask = torch.ones_like(source)
        given = encoder(input_ids=source, attention_mask=mask) | {"encoder_attention_mask": mask}
        ours = files.greedy(model, {"input_ids": source})[0, 1:].tolist()
        assert follow(model, decoder, given, start, (1,)) == ours
        found.add(tuple(ours))
    assert len(found) > 1


def test_refused(tmp_path, capsys, monkeypatch):
    """a program that computes something else: refused in a line, nothing is left"""
    module = pytest.importorskip("hf_scratch_transformer.conversion.executorch")
    export = module.ExecutorchExporter.export

    def another(self, model, inputs, config):
        with torch.no_grad():
            model.get_input_embeddings().weight[5:] += 0.1
            exported = export(self, model, inputs, config)
            model.get_input_embeddings().weight[5:] -= 0.1
        return exported

    monkeypatch.setattr(module.ExecutorchExporter, "export", another)
    tiny.model(ScratchEncoderModel).save_pretrained(tmp_path / "ours")
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "deep" / "new"), "--to", "executorch"]) == 2
    assert "would compute something else by executorch" in capsys.readouterr().err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
