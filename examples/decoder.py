"""
A decoder: one token after the other
====================================

The second stack of *Attention Is All You Need* alone, as in GPT: each token sees those before it, and has to say the
next one. That is enough to write. This tutorial trains such a model in a loop of a dozen lines, so that nothing of it
is hidden.

To run it, ``python -m examples.decoder FOLDER STEPS``; both may be left out, for a temporary folder and 400 steps.
"""

# %%
# Text
# ----
# The English side of the grammar in ``demo/``, of which we take the short sentences.
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from demo import grammar
from hf_scratch_transformer import ScratchDecoderConfig, ScratchDecoderForCausalLM
from hf_scratch_transformer.insight import pictures
from hf_scratch_transformer.tokenization import config_fields, train_tokenizer

# sphinx_gallery_thumbnail_number = 1
folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
folder.mkdir(parents=True, exist_ok=True)
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 400
set_seed(1)
texts = [pair.english for pair in grammar.generate(20_000) if len(pair.english.split()) <= 7]
print(f"{len(texts):,} sentences, such as")
print(*texts[:3], sep="\n")

# %%
# Tokens
# ------
# Byte-level BPE, as GPT-2 has it: it begins with the 256 bytes, so that no text is unknown to it, and joins the pair
# that is most frequent until the vocabulary is full. A space belongs to the word after it, and is written ``Ġ``. Each
# sentence ends in a token of its own; the model learns to write that one too, and thereby to stop.
tokenizer = train_tokenizer(texts, family="decoder", vocab_size=2000)
print(tokenizer.tokenize(texts[0] + tokenizer.eos_token))

# %%
# A model
# -------
# Twice as many heads for the queries as for keys and values, which share them in pairs: what is kept of every token
# while it writes, the key-value cache, is half as large.
config = ScratchDecoderConfig(
    **config_fields(tokenizer, "decoder"),
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    hidden_act="swiglu",
    norm_type="rms_norm",
    norm_position="pre",
    position_embedding_type="rotary",
    dropout=0.0,
)
model = ScratchDecoderForCausalLM(config)
print(f"{model.num_parameters():,} parameters")

# %%
# Training
# --------
# The labels are the ids themselves: the model shifts them by one, so that each place is scored on the token after it.
# Padding is -100, where no loss is computed. The loss is the mean cross-entropy in nats a token; a model that knows
# nothing begins near ``ln(vocabulary)``.
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.1)
print(f"knowing nothing: {torch.tensor(len(tokenizer)).log():.2f}")
losses = []
for step in range(steps):
    rows = [texts[index] + tokenizer.eos_token for index in torch.randint(len(texts), (48,)).tolist()]
    batch = tokenizer(rows, padding=True, return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    loss = model(**batch, labels=labels).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if step % max(1, steps // 5) == 0 or step == steps - 1:
        print(f"step {step}: {losses[-1]:.2f}")
model.eval()

# %%
# What comes next
# ---------------
# The model gives every token of the vocabulary a score, the logits, at every place. After a softmax those of the last
# place are the probabilities of what comes next.
text = "My sister wants to"
tokens = tokenizer(text, return_tensors="pt")
with torch.no_grad():
    outputs = model(**tokens)
print("logits (texts, tokens, vocabulary):", tuple(outputs.logits.shape))
best = outputs.logits[0, -1].softmax(-1).topk(5)
for share, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
    print(f"{share:6.1%} {tokenizer.decode([index])!r}")

# %%
# Writing
# -------
# To take the likeliest token each time gives one text, always the same. To draw from the probabilities gives many. Keys
# and values of earlier tokens are kept in a cache; without it the model computes them again at every step, and writes
# the same.
for use_cache in (True, False):
    written = model.generate(**tokens, max_new_tokens=20, do_sample=False, use_cache=use_cache)
    print(f"use_cache={use_cache}: {tokenizer.decode(written[0], skip_special_tokens=True)!r}")
drawn = model.generate(**tokens, max_new_tokens=20, do_sample=True, top_k=20, num_return_sequences=5)
for written in tokenizer.batch_decode(drawn, skip_special_tokens=True):
    print(f"   {written}   ({'from the text' if written in texts else 'new'})")

# %%
# No token sees those after it
# ----------------------------
# That is the mask: the maps are empty above the diagonal. Without it the next token would be there to be read, and
# training would teach nothing but to copy.
weights = pictures.attention_weights(model, tokenizer, texts[0])
print("largest weight on a later token:", weights.weights.triu(1).abs().max().item())
figure = pictures.attention(weights, layer=1)
pictures.save(figure, folder / "attention.png")

# %%
# How it tells positions apart
# ----------------------------
# Rotary positions turn queries and keys by an angle that grows with the position. Their product then depends on the
# distance alone, which the right picture shows: all its diagonals have one colour.
code, kind = pictures.position_code(model, length=32)
figure = pictures.positions(code, kind)
pictures.save(figure, folder / "positions.png")

# %%
# Saved, and opened by somebody else
# ----------------------------------
# With the code that it needs: where this package is not installed, ``trust_remote_code=True`` loads it from the folder.
model.save_pretrained(folder / "model")
tokenizer.save_pretrained(folder / "model")
again = AutoModelForCausalLM.from_pretrained(folder / "model", trust_remote_code=True).eval()
with torch.no_grad():
    assert torch.equal(again(**tokens).logits, outputs.logits)
print(type(again).__name__, AutoTokenizer.from_pretrained(folder / "model").decode(again.generate(**tokens)[0]))

# %%
# Where to go next
# ----------------
# ``scratch-transformer new causal_lm --data FOLDER`` writes a recipe for your own text; ``scratch-transformer inspect``
# says what a model of any size takes of memory and operations before you make it. The next tutorial puts an encoder in
# front of the decoder.
