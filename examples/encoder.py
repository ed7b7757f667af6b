# # An encoder from the inside: what it makes of a word
#
#     python examples/encoder.py FOLDER     (a masked language model, ours or native)
#
# or cell by cell in a notebook, where a figure on a line by itself is shown.

# %% The model
import sys

import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

import hf_scratch_transformer  # noqa: F401  (makes our models known to transformers)
from hf_scratch_transformer.insight import pictures

folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForMaskedLM.from_pretrained(folder, attn_implementation="eager").eval()
print(f"{model.num_parameters():,} parameters, {len(tokenizer):,} tokens")

# %% Text becomes tokens, tokens become numbers
river = "Write a poem about a man fishing on a river bank."
money = "Write a poem about a man withdrawing money from a bank."
tokens = tokenizer(river, return_tensors="pt")
print(tokenizer.convert_ids_to_tokens(tokens["input_ids"][0]))

# %% Each token has a learned vector, and leaves the model with a contextual one
encoder = model.base_model
with torch.no_grad():
    learned = model.get_input_embeddings()(tokens["input_ids"])
    outputs = encoder(**tokens, output_attentions=True)
print("learned", tuple(learned.shape), "contextual", tuple(outputs.last_hidden_state.shape))
print(
    "attention: layers", len(outputs.attentions), "(texts, heads, tokens, tokens)", tuple(outputs.attentions[0].shape)
)

# %% The learned vector of *bank* is the same in every sentence, the contextual one is not
bank = pictures.word_vectors(encoder, tokenizer, "bank", [river, money])
for name, vectors in {"learned": bank.learned, "contextual": bank.contextual}.items():
    print(f"{name}: cosine {torch.cosine_similarity(*vectors, dim=0):.3f} between the two sentences")
for sentence, near in zip(bank.sentences, bank.near_contextual, strict=True):
    print(sentence, "->", ", ".join(near))
figure = pictures.embedding_shift(bank)
pictures.save(figure, "encoder-shift.png")

# %% Who looks at whom: each row of a map sums to 1
figure = pictures.attention(pictures.attention_weights(encoder, tokenizer, river))
pictures.save(figure, "encoder-attention.png")

# %% What an encoder was trained for: a word that is hidden
hidden = tokenizer(river.replace("river", tokenizer.mask_token), return_tensors="pt")
with torch.no_grad():
    logits = model(**hidden).logits[hidden["input_ids"] == tokenizer.mask_token_id][0]
best = logits.softmax(-1).topk(5)
for share, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
    print(f"{share:6.1%}  {tokenizer.decode([index])}")
