"""
An encoder: what a word means here
==================================

*Attention Is All You Need* has two stacks of layers. This tutorial trains the first one alone, as BERT did: an encoder
reads a whole sentence at once and gives every token a vector that depends on all the others. We hide words and have
them guessed, then look at what the model makes of a word with two meanings.

To run it, ``python -m examples.encoder FOLDER STEPS``; both may be left out, for a temporary folder and 400 steps.
"""

# %%
# Text
# ----
# Made from a few phrases, so that a minute is enough and everything the model could know is on this page. *Bank* and
# *bat* have two meanings each, a topic for each meaning. Somebody does two things of one topic, and the noun stands
# between them. A word that is hidden can thus be guessed from the rest of the sentence, and only from there: this is
# all that training asks for.
import random
import sys
import tempfile
from pathlib import Path

import torch
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    pipeline,
    set_seed,
)

from hf_scratch_transformer import ScratchEncoderConfig, ScratchEncoderForMaskedLM
from hf_scratch_transformer.embedding import sentence_embeddings
from hf_scratch_transformer.insight import pictures, senses
from hf_scratch_transformer.tokenization import config_fields, train_tokenizer

# sphinx_gallery_thumbnail_number = 1
folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
folder.mkdir(parents=True, exist_ok=True)
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 400
set_seed(1)
TOPICS = {  # what somebody does, and the noun that means something else in another topic
    "river": ("bank", ["swam in the river", "rowed the old boat", "fed the ducks", "caught a large fish"]),
    "money": ("bank", ["paid the bill", "opened an account", "signed the contract", "counted the coins"]),
    "cave": ("bat", ["walked into the cave", "heard wings at night", "slept under the rocks", "carried a lamp"]),
    "tennis": ("bat", ["won the match", "hit the ball", "bought new shoes", "trained on the lawn"]),
}
PEOPLE = ["guest", "teacher", "girl", "farmer", "sister", "doctor", "boy", "singer", "painter", "uncle"]
BETWEEN = ["looked for", "remembered", "spoke about", "saw", "described", "dreamt of"]


def sentence_of(topic: str) -> str:
    noun, actions = TOPICS[topic]
    first, second = random.sample(actions, 2)
    return f"The {random.choice(PEOPLE)} who {first} {random.choice(BETWEEN)} the {noun} and {second}."


texts = [sentence_of(topic) for topic in TOPICS for _ in range(1000)]
print(*texts[::1000], sep="\n")

# %%
# Tokens
# ------
# A model knows numbers, not words. WordPiece finds a vocabulary that writes the text with few tokens: frequent words
# stay whole, rare ones become pieces that begin with ``##``. ``[CLS]`` and ``[SEP]`` stand around every text,
# ``[MASK]`` will stand where a word is hidden.
tokenizer = train_tokenizer(texts, family="encoder", vocab_size=300, lowercase=True)
print(tokenizer.tokenize(texts[0], add_special_tokens=True))

# %%
# A model
# -------
# Each choice is a field of the configuration. These are today's rather than those of 2017: norms before each sub-layer,
# positions as rotations of queries and keys, a gated feed-forward. The vocabulary and the ids of its special tokens
# come from the tokenizer.
config = ScratchEncoderConfig(
    **config_fields(tokenizer, "encoder"),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    hidden_act="swiglu",
    norm_position="pre",
    position_embedding_type="rotary",
    dropout=0.0,
)
model = ScratchEncoderForMaskedLM(config)
print(f"{model.num_parameters():,} parameters")

# %%
# Training
# --------
# The collator hides 15% of the tokens; the loss is the cross-entropy of the right ones, in nats. A model that knew
# nothing would need ``ln(vocabulary)`` of them. There is nothing to learn about the loop: the model is one of
# transformers', so ``Trainer`` trains it.
arguments = TrainingArguments(
    output_dir=str(folder / "trainer"),
    max_steps=steps,
    per_device_train_batch_size=64,
    learning_rate=3e-3,
    warmup_steps=steps // 10,
    lr_scheduler_type="linear",
    logging_steps=max(1, steps // 5),
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
rows = [tokenizer(text) for text in texts]
trainer = Trainer(model, arguments, train_dataset=rows, data_collator=DataCollatorForLanguageModeling(tokenizer))
print(f"knowing nothing: {torch.tensor(len(tokenizer)).log():.2f}")
trainer.train()

# %%
# Filling a gap
# -------------
# What it was trained for. What it proposes follows from the other half of the sentence.
model.eval()
fill = pipeline("fill-mask", model=model, tokenizer=tokenizer)
for sentence in (
    "The girl who swam in the river saw the bank and [MASK] the ducks.",
    "The girl who paid the bill saw the bank and [MASK] the coins.",
    "The girl who hit the ball saw the [MASK] and won the match.",
):
    print(sentence, "->", ", ".join(f"{each['token_str']} {each['score']:.0%}" for each in fill(sentence, top_k=3)))

# %%
# One word, two meanings
# ----------------------
# Each token enters with a learned vector, a row of a table, which knows nothing of its sentence. It leaves with a
# contextual one. *Bank* enters both sentences as the same vector, and attention moves it. The figure shows the move in
# the plane of all vectors in it, among the tokens of the table that are nearest.
river = "The guest who swam in the river looked for the bank and fed the ducks."
money = "The guest who paid the bill looked for the bank and counted the coins."
bank = pictures.word_vectors(model, tokenizer, "bank", [river, money])
for name, vectors in {"learned": bank.learned, "contextual": bank.contextual}.items():
    print(f"{name}: cosine {torch.cosine_similarity(*vectors, dim=0):.2f} between the two sentences")
figure = pictures.embedding_shift(bank)
pictures.save(figure, folder / "bank.png")

# %%
# The move is small: training asks this place for *bank* in either sentence, so that most of the vector has to say just
# that. But it depends on the topic, and a small part is enough. From a hundred sentences we take the mean vector of
# each meaning, and sort a hundred others by the nearer mean.
examples = []
for topic in ("river", "money") * 100:
    words = sentence_of(topic).rstrip(".").split()
    examples.append((senses.Occurrence(tuple(words), words.index("bank")), topic))
score = senses.score(model.base_model, tokenizer, senses.Examples(examples[:100], examples[100:]))
print(f"{score.accuracy:.0f}% sorted rightly, {score.most_frequent:.0f}% by always saying the same")

# %%
# Who looks at whom
# -----------------
# Each row of a map belongs to a token and sums to 1: the shares in which it takes up the values of all others. An
# encoder has no mask: a token looks ahead as well as back.
figure = pictures.attention(pictures.attention_weights(model, tokenizer, river), layer=1)
pictures.save(figure, folder / "attention.png")

# %%
# Sentences as vectors
# --------------------
# The mean of the contextual vectors stands for the sentence. The first two share a topic, the first and the last more
# words.
sentences = [river, "The boy who caught a large fish saw the bank and rowed the old boat.", money]
vectors = sentence_embeddings(model.base_model, tokenizer, sentences, normalize=True)
for sentence, similarities in zip(sentences, (vectors @ vectors.T).tolist(), strict=True):
    print("  ".join(f"{similarity:.2f}" for similarity in similarities), sentence)

# %%
# Saved, and opened by somebody else
# ----------------------------------
# The folder holds the weights, the tokenizer and the few files of code that the model needs, so that it opens where
# this package is not installed, with every Auto class of the family.
model.save_pretrained(folder / "model")
tokenizer.save_pretrained(folder / "model")
print(sorted(path.name for path in (folder / "model").iterdir()))
again = AutoModelForMaskedLM.from_pretrained(folder / "model", trust_remote_code=True).eval()
backbone = AutoModel.from_pretrained(folder / "model", trust_remote_code=True).eval()
inputs = AutoTokenizer.from_pretrained(folder / "model")(river, return_tensors="pt")
with torch.no_grad():
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    print("last hidden state (texts, tokens, hidden_size):", tuple(backbone(**inputs).last_hidden_state.shape))

# %%
# Where to go next
# ----------------
# ``scratch-transformer new masked_lm --data FOLDER`` writes a recipe for your own text, and ``training/finetune.py``
# shows how such a model learns to classify. ``scratch-transformer senses`` sorts the meanings of real words, on
# CoarseWSD-20. The next tutorial turns attention's mask on.
