"""What Text Embeddings Inference computes by a DistilBERT's folder, since it does not run here: the rules in its
`backends/candle/src/models/distilbert.rs`, on what ours is exported to."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn.functional import gelu, layer_norm, linear, relu

from hf_scratch_transformer import ScratchEncoderForMaskedLM, ScratchEncoderModel
from hf_scratch_transformer.cli import main
from hf_scratch_transformer.tokenization import train_tokenizer
from tests import tiny
from tests.tools.conftest import TEXTS

PACKAGE, VERSION = "text-embeddings-inference", "not run"
FIELDS = {"vocab_size": int, "dim": int, "n_layers": int, "n_heads": int, "hidden_dim": int, "activation": str}
FIELDS |= {"max_position_embeddings": int, "pad_token_id": int, "model_type": str}
ACTIVATIONS = {"gelu": partial(gelu, approximate="tanh"), "relu": relu}
NEAR = {"gelu": 1e-3, "relu": 1e-5}  # its GELU is the form with tanh, whatever the configuration says
DISTILBERT = {"norm_type": "layer_norm", "norm_position": "post", "layer_norm_eps": 1e-12, "attention_bias": True}
DISTILBERT |= {"mlp_bias": True, "position_embedding_type": "learned", "embedding_norm": True}
DISTILBERT |= {"num_key_value_heads": tiny.SIZES["num_attention_heads"]}
MODELS = [(ScratchEncoderModel, {}), (ScratchEncoderForMaskedLM, {"lm_head_bias": True, "lm_head_transform": True})]


class Folder:
    """Its configuration and weights, and what is computed by them."""

    def __init__(self, folder):
        read = json.loads((folder / "config.json").read_text())
        assert all(isinstance(read[name], kind) for name, kind in FIELDS.items()) and read["model_type"] == "distilbert"
        self.config = read
        self.weights = load_file(folder / "model.safetensors")
        names = ("distilbert.embeddings", "distilbert.transformer"), ("embeddings", "transformer")
        self.embeddings, self.blocks = next(n for n in names if f"{n[0]}.word_embeddings.weight" in self.weights)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def norm(self, name, x):
        return layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], 1e-12)

    def matrix(self, name, x):
        return linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def vectors(self, texts):
        """Their means over the tokens of each; rows are padded with zeros."""
        rows = [self.tokenizer.encode(text).ids for text in texts]
        length = max(map(len, rows))
        ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
        positions = torch.tensor([[*range(len(row))] + [0] * (length - len(row)) for row in rows])
        mask = torch.tensor([[True] * len(row) + [False] * (length - len(row)) for row in rows])
        tables = (self.weights[f"{self.embeddings}.{name}_embeddings.weight"] for name in ("word", "position"))
        words, places = (table[index] for table, index in zip(tables, (ids, positions), strict=True))
        x = self.norm(f"{self.embeddings}.LayerNorm", words + places)
        for number in range(self.config["n_layers"]):
            x = self.block(f"{self.blocks}.layer.{number}", x, mask)
        return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)

    def block(self, name, x, mask):
        heads = (self.matrix(f"{name}.attention.{part}_lin", x) for part in "qkv")
        q, k, v = (each.unflatten(2, (self.config["n_heads"], -1)).transpose(1, 2) for each in heads)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask[:, None, None], -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = self.norm(f"{name}.sa_layer_norm", x + self.matrix(f"{name}.attention.out_lin", mixed))
        inner = ACTIVATIONS[self.config["activation"]](self.matrix(f"{name}.ffn.lin1", x))
        return self.norm(f"{name}.output_layer_norm", x + self.matrix(f"{name}.ffn.lin2", inner))


@pytest.mark.parametrize("act", NEAR)
@pytest.mark.parametrize(("model_class", "head"), MODELS)
def test_encoder(model_class, head, act, tmp_path):
    """the DistilBERT export by its rules, written out: mean vectors of padded texts = ours within 1e-5 (GELU: 0.001)"""
    tokenizer = train_tokenizer(TEXTS, family="encoder", vocab_size=320, min_frequency=1)
    tokens = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    ours = tiny.model(model_class, **DISTILBERT, **head, **tokens, hidden_act=act)
    for each in (ours, tokenizer):
        each.save_pretrained(tmp_path / "ours")
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--to", "distilbert"]) == 0
    found = Folder(tmp_path / "theirs").vectors(TEXTS)
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        states = ours.base_model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    torch.testing.assert_close(found, (states * mask).sum(1) / mask.sum(1), rtol=0, atol=NEAR[act])
