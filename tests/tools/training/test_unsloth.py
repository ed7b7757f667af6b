"""Unsloth, which falls back to a CPU, in a process of its own: it rewrites transformers and TRL as it is imported."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

from hf_scratch_transformer import ScratchDecoderForCausalLM
from hf_scratch_transformer.conversion import convert_folder
from hf_scratch_transformer.tokenization import config_fields, train_tokenizer
from tests import tiny

LIKE_LLAMA = {"hidden_act": "swiglu", "norm_type": "rms_norm", "position_embedding_type": "rotary"}
PROGRAM = """
import sys, json, torch
from unsloth import FastLanguageModel
folder, ids = sys.argv[1], torch.tensor(json.loads(sys.argv[2]))
model, _ = FastLanguageModel.from_pretrained(
    folder, load_in_4bit=False, dtype=torch.float32, max_seq_length=64, trust_remote_code=True
)
logits = model(input_ids=ids).logits.tolist()
model = FastLanguageModel.get_peft_model(
    model, r=4, lora_alpha=8, lora_dropout=0, use_gradient_checkpointing=False, random_state=0,
    target_modules=["q_proj", "v_proj"],
).train()
optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=0.05)
losses = []
for _ in range(4):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print("RESULT", json.dumps({"logits": logits, "losses": losses, "class": type(model.base_model.model).__name__}))
"""


def run(folder, ids, tmp_path):
    environment = os.environ | {
        "UNSLOTH_COMPILE_LOCATION": str(tmp_path / "compiled"),
        "UNSLOTH_DISABLE_STATISTICS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", PROGRAM, str(folder), json.dumps(ids.tolist())]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    for line in found.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    pytest.fail((found.stderr or found.stdout).strip().splitlines()[-1])


def test_lora(texts, tmp_path):
    """a decoder on a CPU, with trust_remote_code: logits = ours; losses of 4 steps of LoRA = its Llama export's"""
    tokenizer = train_tokenizer(texts, family="decoder", vocab_size=320, min_frequency=1)
    fields = config_fields(tokenizer, "decoder") | LIKE_LLAMA | {"max_position_embeddings": 64}
    model = tiny.model(ScratchDecoderForCausalLM, **fields)
    model.save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    convert_folder(tmp_path / "ours", tmp_path / "llama", "llama")
    ids = tiny.tokens(model.config.vocab_size, 3, 9)
    ours, llama = (run(tmp_path / name, ids, tmp_path) for name in ("ours", "llama"))
    assert (ours["class"], llama["class"]) == ("ScratchDecoderForCausalLM", "LlamaForCausalLM")
    with torch.no_grad():
        assert_close(torch.tensor(ours["logits"]), model(input_ids=ids).logits, atol=1e-5, rtol=1e-5)
    assert ours["losses"][-1] < ours["losses"][0]
    assert_close(ours["losses"], llama["losses"], atol=1e-4, rtol=1e-4)
