# # A decoder from the inside: one token after the other
#
#     python examples/decoder.py FOLDER     (a causal language model, ours or native)
#
# or cell by cell in a notebook, where a figure on a line by itself is shown.

# %% The model
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_scratch_transformer  # noqa: F401  (makes our models known to transformers)
from hf_scratch_transformer.insight import pictures

folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
print(f"{model.num_parameters():,} parameters, {len(tokenizer):,} tokens")

# %% Text becomes vectors, and each vector a score for every token that could come next
text = "To be, or not to be"
tokens = tokenizer(text, return_tensors="pt")
with torch.no_grad():
    embedded = model.get_input_embeddings()(tokens["input_ids"])
    outputs = model(**tokens, labels=tokens["input_ids"], output_attentions=True)
print("tokens", tuple(tokens["input_ids"].shape), "embedded", tuple(embedded.shape))
print("logits", tuple(outputs.logits.shape), f"loss {outputs.loss:.3f} nats a token")

# %% What comes after the text
best = outputs.logits[0, -1].softmax(-1).topk(5)
for share, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
    print(f"{share:6.1%}  {tokenizer.decode([index])!r}")

# %% No token sees those after it: the maps are empty above the diagonal
weights = pictures.attention_weights(model, tokenizer, text)
print("weights on later tokens:", weights.weights.triu(1).abs().max().item())
figure = pictures.attention(weights)
pictures.save(figure, "decoder-attention.png")

# %% How it tells positions apart
code, kind = pictures.position_code(model, length=32)
figure = pictures.positions(code, kind)
pictures.save(figure, "decoder-positions.png")

# %% Writing: the same with and without the cache, which only saves work; then three draws at random
for use_cache in (True, False):
    written = model.generate(**tokens, max_new_tokens=20, do_sample=False, use_cache=use_cache)
    print(f"use_cache={use_cache}: {tokenizer.decode(written[0], skip_special_tokens=True)!r}")
torch.manual_seed(0)
for written in model.generate(**tokens, max_new_tokens=20, do_sample=True, top_k=20, num_return_sequences=3):
    print(repr(tokenizer.decode(written, skip_special_tokens=True)))
