"""
A translator: the whole paper
=============================

Both stacks of *Attention Is All You Need*: an encoder reads the English sentence, a decoder writes the German one token
by token, and looks at the encoder's output while it does. We train a small one, follow its cross-attention, and see
what it does with words whose translation depends on the rest of the sentence.

To run it, ``python -m examples.seq2seq FOLDER STEPS``; both may be left out, for a temporary folder and 600 steps.
"""

# %%
# Pairs
# -----
# The grammar in ``demo/`` says each plan twice, in English and in German, with genders, cases and the German order of
# words. We take short sentences of its 150 commonest words, so that a minute is enough, and hold 200 of them
# out.
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

from demo import grammar
from hf_scratch_transformer import ScratchSeq2SeqConfig, ScratchSeq2SeqForConditionalGeneration
from hf_scratch_transformer.insight import pictures
from hf_scratch_transformer.tokenization import config_fields, train_tokenizer

# sphinx_gallery_thumbnail_number = 1
folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
folder.mkdir(parents=True, exist_ok=True)
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 600
set_seed(1)
short = [pair for pair in grammar.generate(40_000) if len(pair.english.split()) <= 7]
counts = Counter(word for pair in short for word in grammar.words(pair.english))
common = {word for word, _ in counts.most_common(150)}
plain = [pair for pair in short if common.issuperset(grammar.words(pair.english))]
train, _, held_out = grammar.split(plain, held_out=200)
print(f"{len(train):,} pairs, such as")
for pair in train[:3]:
    print(f"   {pair.english} | {pair.german}")

# %%
# One vocabulary for both languages
# ---------------------------------
# As in section 5.1 of the paper: tokens of both languages share ids and vectors, and one table serves as the encoder's
# input, the decoder's input and the decoder's output. ``text_target=`` says which text is the translation.
tokenizer = train_tokenizer(
    (text for pair in train for text in (pair.english, pair.german)), family="seq2seq", vocab_size=1500
)
rows = [tokenizer(pair.english, text_target=pair.german) for pair in train]
print(tokenizer.convert_ids_to_tokens(rows[0]["input_ids"]))
print(tokenizer.convert_ids_to_tokens(rows[0]["labels"]))

# %%
# A model
# -------
# Three kinds of attention, one brick: of the source to itself, of the translation to what has been written of it, and
# of the translation to the source. The last one, cross-attention, is the only way by which English reaches the decoder.
config = ScratchSeq2SeqConfig(
    **config_fields(tokenizer, "seq2seq"),
    hidden_size=128,
    intermediate_size=256,
    encoder_layers=2,
    decoder_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    hidden_act="swiglu",
    norm_position="pre",
    position_embedding_type="rotary",
    use_qk_norm=True,
    initialization="normal_zero_output",
    dropout=0.0,
)
model = ScratchSeq2SeqForConditionalGeneration(config)
print(f"{model.num_parameters():,} parameters")

# %%
# Training
# --------
# The decoder is shown the right translation shifted by one, and at every place has to say the next token: all places
# are trained at once, since its mask keeps each from seeing what comes. The collator pads the rows of a batch, with
# -100 in the labels, where no loss is computed.
arguments = Seq2SeqTrainingArguments(
    output_dir=str(folder / "trainer"),
    max_steps=steps,
    per_device_train_batch_size=32,
    learning_rate=3e-3,
    warmup_steps=steps // 10,
    lr_scheduler_type="linear",
    logging_steps=max(1, steps // 5),
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
collator = DataCollatorForSeq2Seq(tokenizer, model)
trainer = Seq2SeqTrainer(model, arguments, train_dataset=rows, data_collator=collator)
trainer.train()

# %%
# Translating
# -----------
# Now nobody shows it the translation: it reads what it has written itself, and an early mistake stays. A beam keeps
# several beginnings and takes the one that is likeliest as a whole. Sentences that it has never seen:
model.eval()
inputs = tokenizer([pair.english for pair in held_out], padding=True, return_tensors="pt")
expected = [pair.german for pair in held_out]
for beams in (1, 3):
    written = tokenizer.batch_decode(
        model.generate(**inputs, num_beams=beams, max_new_tokens=30), skip_special_tokens=True
    )
    right = sum(ours == german for ours, german in zip(written, expected, strict=True))
    print(f"{beams} beam(s): {right} of {len(held_out)} exactly as the grammar has them")
for pair, ours in list(zip(held_out, written, strict=True))[:5]:
    print(f"   {pair.english} -> {ours}" + ("" if ours == pair.german else f"   (should be: {pair.german})"))

# %%
# Where each word comes from
# --------------------------
# Cross-attention of the last layer, the mean of its heads: for each token that is written, the token of the source that
# it takes most from. Where the orders of the two languages differ, the map leaves the diagonal.
sentence = held_out[0].english
weights = pictures.attention_weights(model, tokenizer, sentence)
for word, most in zip(weights.rows, weights.weights[-1].mean(0).argmax(-1).tolist(), strict=True):
    print(f"{word:>12} <- {weights.columns[most]}")
figure = pictures.attention(weights, layer=1)
pictures.save(figure, folder / "attention.png")

# %%
# Saved, and opened by somebody else
# ----------------------------------
# With the code that it needs, and the tokenizer: ``make demo`` opens such a folder in a process that does not have the
# package, and so can you.
model.save_pretrained(folder / "model")
tokenizer.save_pretrained(folder / "model")
again = AutoModelForSeq2SeqLM.from_pretrained(folder / "model", trust_remote_code=True).eval()
inputs = AutoTokenizer.from_pretrained(folder / "model")([sentence], return_tensors="pt")
assert torch.equal(again.generate(**inputs, max_new_tokens=30), model.generate(**inputs, max_new_tokens=30))
print(type(again).__name__, tokenizer.batch_decode(again.generate(**inputs, max_new_tokens=30))[0])

# %%
# Where to go next
# ----------------
# ``make demo`` trains on the whole grammar, with its long sentences, to nearly all exact. ``python -m training
# multi30k_en_de --data.path FOLDER`` does so on captions that people wrote, and
# ``training/recipes/multi30k_article.yaml`` is the run of the article. The last tutorial goes to other people's models
# and back.
