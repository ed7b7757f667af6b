"""
A native model: here, changed, and back
=======================================

Most models that you meet are not ours. This tutorial takes one of transformers', a Llama, makes it one of ours, changes
its architecture in ways that its own class does not offer, trains it on a little, and gives it back as a native one
that opens without this package and without ``trust_remote_code``.

To run it, ``python -m examples.native FOLDER STEPS``; both may be left out, for a temporary folder and 300 steps.
"""

# %%
# Somebody else's model
# ---------------------
# It would come from the Hub: ``AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M")``. So that nothing is
# downloaded here, we train a small Llama ourselves; of our package it uses only the tokenizer.
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, set_seed

from demo import grammar
from hf_scratch_transformer import ScratchDecoderForCausalLM
from hf_scratch_transformer.conversion import convert_from, convert_to
from hf_scratch_transformer.insight import pictures
from hf_scratch_transformer.surgery import select_layers
from hf_scratch_transformer.tokenization import config_fields, train_tokenizer

# sphinx_gallery_thumbnail_number = 2
folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(), "native")
folder.mkdir(parents=True, exist_ok=True)
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 300
set_seed(1)
texts = [pair.english for pair in grammar.generate(20_000) if len(pair.english.split()) <= 7]
train, held_out = texts[200:], texts[:200]
tokenizer = train_tokenizer(train, family="decoder", vocab_size=2000)


def batch_of(rows: list[str]) -> dict[str, torch.Tensor]:
    batch = tokenizer([row + tokenizer.eos_token for row in rows], padding=True, return_tensors="pt")
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def fit(model: PreTrainedModel, steps: int) -> None:
    """Train on sentences drawn at random."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.1)
    model.train()
    for _ in range(steps):
        rows = [train[index] for index in torch.randint(len(train), (32,)).tolist()]
        model(**batch_of(rows)).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()


@torch.no_grad()
def loss_of(model: PreTrainedModel) -> float:
    """Of the sentences held out, in nats a token."""
    return float(model(**batch_of(held_out)).loss)


sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
fields = config_fields(tokenizer, "decoder")
llama = LlamaForCausalLM(LlamaConfig(**fields, **sizes, max_position_embeddings=64, tie_word_embeddings=True))
fit(llama, steps)
print(f"{type(llama).__name__}: {llama.num_parameters():,} parameters, loss {loss_of(llama):.3f}")

# %%
# As one of ours
# --------------
# A Llama is a choice of options: rotary positions, RMSNorm before each sub-layer, SwiGLU, no biases, heads in groups.
# ``convert_from`` reads them from its configuration and renames the tensors, one by one. The same numbers in the same
# formulas give the same logits, up to the rounding of another order of sums.
model = convert_from(llama)
inputs = tokenizer(held_out[0], return_tensors="pt")
with torch.no_grad():
    apart = (model(**inputs).logits - llama(**inputs).logits).abs().max()
print(f"{type(model).__name__}: loss {loss_of(model):.3f}, logits at most {apart:.0e} apart")
for name in ("norm_type", "norm_position", "hidden_act", "position_embedding_type", "num_key_value_heads"):
    print(f"   {name}={getattr(model.config, name)!r}")
figure = pictures.attention(pictures.attention_weights(model, tokenizer, held_out[0]), layer=1)
pictures.save(figure, folder / "before.png")

# %%
# Fewer layers
# ------------
# What a layer adds goes on top of what comes in, so a model without one of its layers still speaks, only worse.
# Distillation begins like this (Sanh et al., 2019).
small = select_layers(model, [0, 1, 3])
print(f"{small.num_parameters():,} parameters, loss {loss_of(small):.3f}")

# %%
# A window
# --------
# Llama lets each token see all before it. As one of ours it is a field away from seeing the last four only: options
# that do not change the shape of a tensor may be given when it is opened.
small.save_pretrained(folder / "small")
windowed = ScratchDecoderForCausalLM.from_pretrained(
    folder / "small", sliding_window=4, layer_types=["sliding_attention"] * 3
)
print(f"loss {loss_of(windowed):.3f}")
figure = pictures.attention(pictures.attention_weights(windowed, tokenizer, held_out[0]), layer=1)
pictures.save(figure, folder / "after.png")

# %%
# Training on
# -----------
# The changed model has lost a part of what it knew, and a little training brings that back. (It has then
# seen more sentences than the first, too.)
fit(windowed, max(1, steps // 3))
print(f"loss {loss_of(windowed):.3f}")

# %%
# Back
# ----
# It is no Llama any more, which has no window. Asked for one, the conversion says what stands in the way. But Mistral
# is a Llama with a window.
try:
    convert_to(windowed, "llama")
except ValueError as error:
    print(error)
mistral = convert_to(windowed, "mistral")
mistral.save_pretrained(folder / "mistral")
tokenizer.save_pretrained(folder / "mistral")
print(sorted(path.name for path in (folder / "mistral").iterdir()))

# %%
# Opened by transformers alone
# ----------------------------
# The folder has no code and asks for no trust: whatever serves Mistral serves it. It is compared with ours, logit by
# logit and in what it writes.
native = AutoModelForCausalLM.from_pretrained(folder / "mistral").eval()
with torch.no_grad():
    apart = (native(**inputs).logits - windowed(**inputs).logits).abs().max()
print(f"{type(native).__module__}.{type(native).__name__}: logits at most {apart:.0e} apart")
assert apart < 1e-4
prompt = tokenizer("The farmer", return_tensors="pt")
for each in (windowed, native):
    print(tokenizer.decode(each.generate(**prompt, max_new_tokens=20, do_sample=False)[0], skip_special_tokens=True))

# %%
# Where to go next
# ----------------
# ``scratch-transformer convert`` does the same from folder to folder, for more than fifty architectures; it and the
# commands ``layers``, ``average`` and ``vocabulary`` are in README. ``docs/ARCHITECTURES.md`` lists which options each
# of them uses.
