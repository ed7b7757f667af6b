# # A translator from the inside: where each word comes from
#
#     python examples/seq2seq.py FOLDER     (an encoder-decoder, ours or native; `make demo` trains one)
#
# or cell by cell in a notebook, where a figure on a line by itself is shown.

# %% The model
import sys

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import hf_scratch_transformer  # noqa: F401  (makes our models known to transformers)
from hf_scratch_transformer.insight import pictures

folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="eager").eval()
print(f"{model.num_parameters():,} parameters, {len(tokenizer):,} tokens")

# %% Translation: greedy, and with a beam of 3
river = "She swam in the river before she dreamt of a bank."
money = "The guest who paid the bill is looking for a bank."
inputs = tokenizer([river, money], padding=True, return_tensors="pt")
for beams in (1, 3):
    written = model.generate(**inputs, num_beams=beams, max_new_tokens=30)
    print(f"beams {beams}:", tokenizer.batch_decode(written, skip_special_tokens=True))

# %% Training sees a translation whole: the decoder reads it shifted by one, and is to write it
labels = tokenizer(text_target=["Sie ist im Fluss geschwommen."], return_tensors="pt")["input_ids"]
source = tokenizer([river], return_tensors="pt")
with torch.no_grad():
    embedded = model.get_input_embeddings()(source["input_ids"])
    outputs = model(**source, labels=labels, output_attentions=True)
print("source", tuple(source["input_ids"].shape), "embedded", tuple(embedded.shape))
print("encoded", tuple(outputs.encoder_last_hidden_state.shape), "logits", tuple(outputs.logits.shape))
print("cross-attention (texts, heads, target, source)", tuple(outputs.cross_attentions[0].shape))

# %% Where each word of the translation comes from: the source token that gets most, over the last layer's heads
weights = pictures.attention_weights(model, tokenizer, river)
for word, most in zip(weights.rows, weights.weights[-1].mean(0).argmax(-1).tolist(), strict=True):
    print(f"{word:>12} <- {weights.columns[most]}")
figure = pictures.attention(weights, layer=len(weights.weights) - 1)
pictures.save(figure, "seq2seq-attention.png")

# %% The encoder has moved *bank* before the decoder looks at it
bank = pictures.word_vectors(model, tokenizer, "bank", [river, money])
print(f"cosine of the two contextual vectors: {torch.cosine_similarity(*bank.contextual, dim=0):.3f}")
figure = pictures.embedding_shift(bank)
pictures.save(figure, "seq2seq-shift.png")
