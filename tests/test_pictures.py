"""Pictures show what they say: the numbers that are drawn are the model's, and its labels are legible."""

import argparse
import functools
import itertools
import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from torch.nn import functional as F

import hf_scratch_transformer as scratch
from hf_scratch_transformer.insight import pictures, plot
from hf_scratch_transformer.layers_scratch import rotate
from hf_scratch_transformer.tokenization import config_fields, train_tokenizer
from tests import tiny

RIVER = "She sat on the river bank."
MONEY = "She took the money from the bank, and more money."
LONG = " ".join(["The old man and the sea were on the bank of the river, quietly reading."] * 3)
CORPUS = [RIVER, MONEY, LONG, "Sie saß am Ufer des Flusses und zählte $5 und $6."] * 5
MODELS = {
    "encoder": scratch.ScratchEncoderForMaskedLM,
    "decoder": scratch.ScratchDecoderForCausalLM,
    "seq2seq": scratch.ScratchSeq2SeqForConditionalGeneration,
}
NATIVE = {
    "bert": dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48),
    "roberta": dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, pad_token_id=1),
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4),
    "llama": dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48),
    "bart": dict(d_model=32, encoder_layers=1, decoder_layers=2, encoder_ffn_dim=48, decoder_ffn_dim=48)
    | dict(encoder_attention_heads=4, decoder_attention_heads=4),
    "marian": dict(d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=48, decoder_ffn_dim=48)
    | dict(encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=64),
    "t5": dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
}


@functools.cache
def tokenizer(family):
    return train_tokenizer(CORPUS, family=family, vocab_size=420 if family != "encoder" else 150)


def ours(family, **overrides):
    vocabulary = tokenizer(family)
    fields = config_fields(vocabulary, family) | {"max_position_embeddings": 128} | overrides
    return tiny.model(MODELS[family], **fields), vocabulary


def native(name, **overrides):
    """A random model of another family, with the tokenizer of ours that is most like it."""
    family = "seq2seq" if name in ("bart", "marian", "t5") else "decoder" if name in ("gpt2", "llama") else "encoder"
    vocabulary = tokenizer(family)
    fields = config_fields(vocabulary, family) | {"forced_eos_token_id": None} | NATIVE[name] | overrides
    config = transformers.AutoConfig.for_model(name, **fields)
    torch.manual_seed(0)
    auto_class = getattr(transformers, tiny.auto_class(MODELS[family]))
    return auto_class.from_config(config, attn_implementation="eager").eval(), vocabulary


def make(name):
    return ours(name) if name in tiny.FAMILIES else native(name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Saved models of ours and of others, each with its tokenizer."""
    places = {name: tmp_path_factory.mktemp(name) / "tiny" for name in (*tiny.FAMILIES, "bert", "gpt2", "marian")}
    for name, place in places.items():
        for part in make(name):
            part.save_pretrained(place)
    return places


def image(axes):
    return np.asarray(axes.images[0].get_array())


def drawn(figure):
    """The same figure, with everything at its place."""
    FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    return figure


def overlaps(texts):
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    return [(a, b) for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)]


# Positions


def test_the_heat_map_of_positions_shows_the_papers_formula():
    figure = pictures.positions(pictures.sinusoidal_code(3, 5))
    expected = [[0, 1, 0], [0.84, 0.54, 0], [0.91, -0.42, 0], [0.14, -0.99, 0.01], [-0.76, -0.65, 0.01]]
    np.testing.assert_array_equal(image(figure.axes[0]).round(2), np.array(expected, dtype="float32"))

    code = pictures.sinusoidal_code()
    heat, products = (image(axes) for axes in pictures.positions(code).axes[:2])
    assert heat.shape == (100, 400) and products.shape == (100, 100)
    # sin a sin b + cos a cos b = cos(a - b): the product depends on the distance only.
    distances = np.subtract.outer(np.arange(100), np.arange(100))[..., None]
    cosines = np.cos(distances / 10000 ** (np.arange(0, 400, 2) / 400)).sum(-1)
    np.testing.assert_allclose(products, cosines, atol=0.01)


def test_positions_of_a_model_are_its_own():
    model, _ = ours("encoder", position_embedding_type="learned")
    code, kind = pictures.position_code(model, 20)
    assert kind == "learned positions" and torch.equal(code, model.get_position_embeddings().weight[:20])
    model, _ = ours("seq2seq", position_embedding_type="sinusoidal")
    code, kind = pictures.position_code(model, 200)
    assert kind == "sinusoidal positions" and torch.equal(code, pictures.sinusoidal_code(32, 200))
    gpt2, _ = native("gpt2")
    assert torch.equal(pictures.position_code(gpt2, 9)[0], gpt2.transformer.wpe.weight[:9])
    for name, table in {
        "roberta": "roberta.embeddings.position_embeddings",
        "bart": "model.encoder.embed_positions",
    }.items():
        model, _ = native(name)  # the first two rows are no positions
        assert torch.equal(pictures.position_code(model, 9)[0], model.get_submodule(table).weight[2:11])
    code, kind = pictures.position_code(native("marian")[0], 9)
    assert kind == "fixed positions"
    assert torch.allclose(code @ code.T, pictures.sinusoidal_code(32, 9) @ pictures.sinusoidal_code(32, 9).T)


def test_products_of_rotary_positions_are_what_attention_sees():
    model, _ = ours("decoder", position_embedding_type="rotary")
    code, kind = pictures.position_code(model, 30)
    cos, sin = model.get_submodule("model.rotary.full_attention")(torch.arange(30)[None], torch.float32)
    same = torch.cat((torch.ones(4), torch.zeros(4))).expand(1, 1, 30, 8)  # one vector at every position
    turned = rotate(same, cos, sin)[0, 0]
    assert kind == "rotary positions" and torch.allclose(code @ code.T, turned @ turned.T, atol=1e-4)
    assert torch.allclose(code, pictures.position_code(native("llama")[0], 30)[0])


def test_positions_that_are_not_there():
    model, _ = ours("encoder", position_embedding_type="learned")
    with pytest.raises(ValueError, match="length=129: .* has a table of 128 positions"):
        pictures.position_code(model, 129)
    with pytest.raises(ValueError, match="no code of absolute positions"):
        pictures.position_code(native("t5")[0])
    for wrong in ({"dim": 0}, {"length": -1}):
        with pytest.raises(ValueError, match=r"must be at least 1"):
            pictures.sinusoidal_code(**wrong)


# Attention


@pytest.mark.parametrize("name", [*tiny.FAMILIES, *NATIVE])
def test_what_is_plotted_is_the_models_attention_and_sums_to_one(name):
    model, vocabulary = make(name)
    shown = pictures.attention_weights(model, vocabulary, RIVER, "Ufer" if model.config.is_encoder_decoder else None)
    figure = pictures.attention(shown)
    layers, heads = shown.weights.shape[:2]
    panels = figure.axes[: layers * heads]
    assert heads == 4 and len(panels) == len(figure.axes) - 1, "one axis more for the scale"
    for panel, weights in zip(panels, shown.weights.flatten(0, 1), strict=True):
        np.testing.assert_allclose(image(panel).sum(-1), 1, atol=1e-5)
        np.testing.assert_array_equal(image(panel), weights)
        assert image(panel).shape == (len(shown.rows), len(shown.columns))
    inputs = vocabulary([RIVER], return_tensors="pt")
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            target = vocabulary(text_target=["Ufer"], return_tensors="pt")["input_ids"]
            read = torch.cat((torch.tensor([[model.config.decoder_start_token_id]]), target[:, :-1]), dim=-1)
            outputs = model(**inputs, decoder_input_ids=read, output_attentions=True)
            expected = outputs.cross_attentions
            for of in ("encoder", "decoder"):
                other = pictures.attention_weights(model, vocabulary, RIVER, "Ufer", of=of)
                assert torch.equal(other.weights, torch.cat(outputs[f"{of}_attentions"]))
                assert len(other.rows) == len(other.columns) == other.weights.shape[-1]
        else:
            expected = model(**inputs, output_attentions=True).attentions
    assert torch.equal(shown.weights, torch.cat(expected))


def test_rows_of_a_translation_are_the_tokens_it_writes():
    model, vocabulary = ours("seq2seq")
    shown = pictures.attention_weights(model, vocabulary, RIVER)
    source = vocabulary([RIVER], return_tensors="pt")
    written = model.generate(**source, do_sample=False, max_new_tokens=2 * source["input_ids"].numel() + 10)[0, 1:]
    assert shown.rows == pictures.readable(vocabulary, written)
    assert shown.columns[:2] == ["She", "sat"] and shown.columns[-1] == "</s>"
    again = pictures.attention_weights(model, vocabulary, RIVER, of="decoder")
    assert again.rows[0] == "<s>" and again.rows[1:] == shown.rows[:-1], "it reads what it wrote, one step later"
    assert not again.weights.triu(1).any()


def test_tokens_are_written_as_people_read_them():
    vocabulary = tokenizer("seq2seq")
    tokens = pictures.readable(vocabulary, vocabulary("Sie saß zählte $5", return_tensors="pt")["input_ids"][0])
    assert tokens == ["Sie", "saß", "zählte", "$", "5", "</s>"]
    letters = train_tokenizer(["a b\tc\nd"], family="decoder", algorithm="char")
    tokens = pictures.readable(letters, letters("a b\tc\nd", return_tensors="pt")["input_ids"][0])
    assert tokens == ["a", "␣", "b", "⇥", "c", "↵", "d"]
    odd = vocabulary("你\x01\x1d", return_tensors="pt")["input_ids"][0]  # bytes of a letter; signs without a shape
    assert len(odd) == 6
    assert all(token.isprintable() and "\ufffd" not in token for token in pictures.readable(vocabulary, odd))


@pytest.mark.parametrize("text", ["Bank.", LONG])
@pytest.mark.parametrize("choice", [{}, {"layer": 1}, {"layer": 1, "head": 2}])
def test_every_token_is_readable_and_the_title_says_what_it_is(text, choice):
    model, vocabulary = ours("encoder")
    shown = pictures.attention_weights(model, vocabulary, text)
    if text == LONG:
        assert len(shown.rows) > 40
    figure = drawn(pictures.attention(shown, **choice))
    left, below = figure.axes[0], figure.axes[-2]
    for labels, tokens in ((left.get_yticklabels(), shown.rows), (below.get_xticklabels(), shown.columns)):
        assert [label.get_text() for label in labels] == tokens
        assert not overlaps(labels)
        assert all(figure.bbox.contains(*point) for label in labels for point in label.get_window_extent().corners())
    title = figure.get_suptitle()
    assert title.startswith("ScratchEncoderForMaskedLM: self-attention")
    assert all(f"{name} {index}" in title for name, index in choice.items())
    titles = [axes.get_title() for axes in figure.axes[:-1]]
    places = itertools.product([choice.get("layer")] if "layer" in choice else range(2), range(4))
    places = [place for place in places if place[1] == choice.get("head", place[1])]
    expected = [f"layer {layer}, head {head}" for layer, head in places]
    assert titles == (expected if len(expected) > 1 else [""])


def test_a_crowd_of_tokens_is_thinned_out_not_printed_on_itself():
    tokens = [f"token{i}" for i in range(300)]
    weights = torch.full((1, 2, 300, 300), 1 / 300)
    shown = pictures.Attention(weights, tokens, tokens, "self-attention", "a model")
    labels = drawn(pictures.attention(shown)).axes[0].get_yticklabels()
    assert 50 < len(labels) < 300 and not overlaps(labels)


def test_attention_that_is_not_there():
    encoder, translator = ours("encoder"), ours("seq2seq")
    with pytest.raises(ValueError, match="of='cross': .* is one stack"):
        pictures.attention_weights(*encoder, RIVER, of="cross")
    with pytest.raises(ValueError, match="of='self': .* is an encoder-decoder; it has attention of cross, enc"):
        pictures.attention_weights(*translator, RIVER, of="self")
    with pytest.raises(ValueError, match="target='Ufer': .* is no encoder-decoder"):
        pictures.attention_weights(*encoder, RIVER, "Ufer")
    with pytest.raises(ValueError, match=r"text='a\\ud800': TypeError"):
        pictures.encode(*ours("decoder"), "a\ud800")
    with pytest.raises(ValueError, match="text='' has no tokens"):
        pictures.attention_weights(*ours("decoder"), "")
    with pytest.raises(ValueError, match="more than max_position_embeddings=16"):
        pictures.attention_weights(*ours("encoder", max_position_embeddings=16), LONG)
    with pytest.raises(ValueError, match="target: ScratchSeq2SeqModel was loaded without the head that writes one"):
        pictures.attention_weights(translator[0].model, translator[1], RIVER)
    model, vocabulary = native("bert")
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match='load it with attn_implementation="eager"'):
        pictures.attention_weights(model, vocabulary, RIVER)
    shown = pictures.attention_weights(*encoder, RIVER)
    for wrong, message in (
        ({"layer": 2}, "layer=2: .* has layers 0 to 1"),
        ({"layer": 0, "head": -1}, "head=-1: .* has heads 0 to 3"),
    ):
        with pytest.raises(ValueError, match=message):
            pictures.attention(shown, **wrong)


# Words


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_words_vectors_are_the_learned_one_and_those_of_its_sentences(family):
    model, vocabulary = ours(family)
    shown = pictures.word_vectors(model, vocabulary, "bank", [RIVER, MONEY])
    assert torch.equal(shown.learned[0], shown.learned[1])
    assert not torch.allclose(shown.contextual[0], shown.contextual[1], atol=0.1)
    tokens = vocabulary(RIVER, return_tensors="pt")
    place = pictures.readable(vocabulary, tokens["input_ids"][0]).index("bank")
    stack = model.model.encoder if family == "seq2seq" else model.model
    with torch.no_grad():
        learned = stack.embeddings.word_embeddings(tokens["input_ids"])[0, place]
        contextual = stack(**tokens).last_hidden_state[0, place]
    assert torch.equal(shown.learned[0], learned) and torch.allclose(shown.contextual[0], contextual)


def test_a_special_token_that_the_vocabulary_lacks_is_no_neighbour_to_leave_out():
    model, vocabulary = ours("decoder")
    expected = pictures.word_vectors(model, vocabulary, "bank", [RIVER])
    vocabulary.eos_token = ""
    assert None in vocabulary.all_special_ids
    assert torch.equal(pictures.word_vectors(model, vocabulary, "bank", [RIVER]).contextual[0], expected.contextual[0])


def test_a_word_in_pieces_is_their_mean_and_case_does_not_matter():
    model, vocabulary = ours("encoder")
    word = "bankriver"
    ids = vocabulary(word, add_special_tokens=False)["input_ids"]
    shown = pictures.word_vectors(model, vocabulary, word.upper(), [f"the {word}, and more"], neighbours=0)
    assert len(ids) > 1
    assert torch.allclose(shown.learned[0], model.get_input_embeddings().weight[ids].mean(0))


def test_a_word_that_is_other_tokens_in_another_sentence_says_so():
    """A byte-level tokenizer keeps the space before a word: two vectors of the table, not one that has moved."""
    model, vocabulary = ours("decoder")
    sentences = ["bank of the river", "the bank of the river"]
    shown = pictures.word_vectors(model, vocabulary, "bank", sentences)
    assert shown.written == [" ".join(vocabulary.tokenize(text)) for text in ("bank", " bank")]
    assert shown.written[0] != shown.written[1] and not torch.equal(shown.learned[0], shown.learned[1])
    for written, panel in zip(shown.written, drawn(pictures.embedding_shift(shown)).axes, strict=True):
        texts = [text.get_text() for text in panel.texts if text.get_text()]
        assert texts[:2] == [written, "bank"]


def test_a_word_whose_tokens_are_bytes_is_written_in_its_letters():
    model, vocabulary = ours("decoder")
    assert vocabulary.tokenize("мост") != ["мост"]
    shown = pictures.word_vectors(model, vocabulary, "мост", ["мост, мост", "the мост"])
    assert shown.written == ["мост", "мост"]


def test_signs_that_the_default_font_lacks_are_written_in_one_that_has_them(recwarn):
    model, vocabulary = ours("encoder")
    vocabulary.add_tokens(["の"])  # which STIXGeneral has, that comes with matplotlib
    model.resize_token_embeddings(len(vocabulary))
    drawn(pictures.attention(pictures.attention_weights(model, vocabulary, "Bank の")))
    drawn(pictures.embedding_shift(pictures.word_vectors(model, vocabulary, "の", ["bank の", "の bank"])))
    assert not [str(warning.message) for warning in recwarn if "Glyph" in str(warning.message)]


def test_neighbours_are_the_nearest_of_the_table():
    model, vocabulary = ours("encoder")
    shown = pictures.word_vectors(model, vocabulary, "bank", [RIVER], neighbours=4)
    table = model.get_input_embeddings().weight.detach()
    for vector, near in ((shown.learned[0], shown.near_learned[0]), (shown.contextual[0], shown.near_contextual[0])):
        ranked = F.cosine_similarity(table, vector, dim=-1).argsort(descending=True).tolist()
        own = vocabulary.convert_tokens_to_ids("bank")
        ranked = [index for index in ranked if index != own and index not in vocabulary.all_special_ids][:4]
        assert list(near) == vocabulary.convert_ids_to_tokens(ranked)
        assert torch.equal(torch.stack([*near.values()]), table[ranked])


def test_the_plane_is_that_of_the_largest_variance():
    vectors = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)) * torch.tensor([1, 5, 1, 3, 1, 1.0])
    mean, directions, shares = pictures.principal_plane(vectors)
    variances, axes = np.linalg.eigh(np.cov(vectors.numpy().T))
    np.testing.assert_allclose(shares, (variances / variances.sum())[:-3:-1], rtol=1e-4)
    np.testing.assert_allclose(np.abs(directions.numpy() @ axes[:, :-3:-1]), np.eye(2), atol=1e-3)
    assert (directions.gather(1, directions.abs().argmax(1, keepdim=True)) > 0).all()
    assert torch.allclose(mean, vectors.mean(0))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_arrows_lead_from_the_learned_to_the_contextual_vector(count):
    model, vocabulary = ours("encoder")
    sentences = [RIVER, MONEY, "The bank.", LONG][:count]
    shown = pictures.word_vectors(model, vocabulary, "bank", sentences)
    figure = drawn(pictures.embedding_shift(shown))
    assert len(figure.axes) == count and "bank" in figure.get_suptitle()
    for index, panel in enumerate(figure.axes):
        assert panel.get_title().replace("\n", " ") == sentences[index]
        arrows = [text for text in panel.texts if text.arrow_patch is not None]
        assert len(arrows) == count
        if count == 2:  # three vectors lie in one plane: nothing is lost
            ends = F.normalize(torch.stack((shown.learned[index], shown.contextual[index])), dim=-1)
            start, end = np.array(arrows[index].xyann), np.array(arrows[index].xy)
            assert np.linalg.norm(end - start) == pytest.approx(float((ends[1] - ends[0]).norm()), abs=1e-4)
        labels = [text for text in panel.texts if text.get_text()]
        tokens = {*shown.near_learned[index], *shown.near_contextual[index]}
        assert sorted(label.get_text() for label in labels) == sorted(["bank", "bank", *tokens])
        assert not overlaps(labels)


def test_words_that_are_not_there():
    model, vocabulary = ours("encoder")
    for word, sentences, message in (
        ("bank", [RIVER, "No such word."], "word='bank' is not in the sentence 'No such word.'"),
        ("ban", [RIVER], "word='ban' is not in the sentence"),
        ("", [RIVER], "word='' is not in the sentence"),
        ("bank", [], "sentences: give one at least"),
    ):
        with pytest.raises(ValueError, match=message):
            pictures.word_vectors(model, vocabulary, word, sentences)


# Curves


def records(steps=30, **scores):
    lines = [{"event": "train", "step": step, "loss": 5 - step / 10} for step in range(steps)]
    return lines + [{"event": "evaluation", "step": step, "loss": 4 - step / 12, **scores} for step in (10, 20)]


def test_the_curves_of_a_run_are_red_and_blue_with_the_score_beside_them():
    loss, score = pictures.curves({"run": records(bleu=30.0, exact_match=5.0)}).axes
    train, evaluation = loss.lines
    assert train.get_color() == "red" and list(train.get_ydata()) == [5 - step / 10 for step in range(30)]
    assert evaluation.get_color() == "blue" and list(evaluation.get_xdata()) == [10, 20]
    assert score.get_ylabel() == "BLEU" and list(score.lines[0].get_ydata()) == [30, 30]
    assert len(pictures.curves({"run": records()}).axes) == 1, "no score, no panel for it"
    smoothed = [{**line, "label_smoothing": 0.1} if line["event"] == "train" else line for line in records()]
    for lines, labels in (
        (records(), ["training", "evaluation"]),
        (smoothed, ["training, label smoothing 0.1", "evaluation"]),
        (records()[:30], ["training"]),
        (records()[30:], ["evaluation"]),
    ):
        legend = pictures.curves({"run": lines}).axes[0].get_legend()
        assert [text.get_text() for text in legend.get_texts()] == labels


def test_several_runs_have_a_colour_and_a_name_each():
    runs = {f"run {i}": records(bleu=i) for i in range(9)}
    loss, score = pictures.curves(runs).axes
    assert [text.get_text() for text in loss.get_legend().get_texts()] == list(runs)
    looks = [(line.get_color(), line.get_linestyle()) for line in loss.lines[1::2]]
    assert len(set(looks)) == 9 and looks == [(line.get_color(), line.get_linestyle()) for line in score.lines]


def test_metrics_that_cannot_be_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps(record) for record in records()]
    path.write_text("\n".join(lines) + '\n{"event": "train", "st', encoding="utf-8")
    assert pictures.read_metrics(tmp_path) == pictures.read_metrics(path) == records()
    path.write_text(f"{lines[0]}\nno record\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 2: not JSON"):
        pictures.read_metrics(path)
    path.write_text("[1]\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: a record needs 'event' and 'step'"):
        pictures.read_metrics(path)
    path.write_text('{"event": "train", "step": 1, "loss": {}}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: loss={} must be a number"):
        pictures.read_metrics(path)
    with pytest.raises(ValueError, match="no metrics of a run to read there"):
        pictures.read_metrics(tmp_path / "absent")
    with pytest.raises(ValueError, match="empty: its metrics have no loss"):
        pictures.curves({"empty": []})


# Parameters


@pytest.mark.parametrize("name", [*tiny.FAMILIES, *NATIVE])
@pytest.mark.parametrize("tied", [True, False])
def test_bars_add_up_to_the_model(name, tied):
    model, _ = (ours if name in tiny.FAMILIES else native)(name, tie_word_embeddings=tied)
    counts = pictures.parameter_counts(model)
    assert sum(counts.values()) == model.num_parameters()
    assert not any(part.isdigit() for name in counts for part in name.split(".")), "layers are taken together"
    figure = pictures.parameters(counts, "a model")
    assert [bar.get_width() for bar in figure.axes[0].patches] == list(counts.values())
    assert f"{model.num_parameters():,}" in figure.get_suptitle()


# The command


def command(*words):
    parser = argparse.ArgumentParser()
    plot.add_commands(parser.add_subparsers())
    arguments = parser.parse_args(["plot", *map(str, words)])
    arguments.run(arguments)


def test_the_command_draws_every_kind(folders, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records(bleu=1)), encoding="utf-8")
    encoder, translator = folders["encoder"], folders["seq2seq"]
    for suffix, *words in (
        ("svg", "positions"),
        ("PNG", "positions", folders["decoder"], "--length", 16),
        ("svg", "attention", encoder, RIVER),
        ("png", "attention", folders["bert"], RIVER),
        ("png", "attention", translator, RIVER, "--target", "am Ufer", "--layer", 1, "--head", 0),
        ("png", "embedding-shift", encoder, "bank", RIVER, MONEY),
        ("png", "curves", run),
        ("svg", "curves", run, run / "metrics.jsonl"),
        ("png", "parameters", translator),
        ("png", "parameters", "llama-3-70b"),
    ):
        path = tmp_path / f"picture.{suffix}"
        command(*words, "--output", path)
        assert capsys.readouterr().out == f"{path}\n"
        if suffix == "svg":
            assert path.read_text(encoding="utf-8").startswith("<?xml")
        else:
            assert np.ptp(imread(path, format="png")[..., :3]) > 0.5
        path.unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "no temporary file is left"


def test_the_command_says_in_a_line_what_is_wrong(folders, tmp_path):
    encoder = folders["encoder"]
    broken = tmp_path / "broken"
    ours("encoder")[0].save_pretrained(broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    partial = tmp_path / "partial"
    model, _ = ours("encoder")
    weights = {name: weight for name, weight in model.state_dict().items() if "layers.1.mlp" not in name}
    model.save_pretrained(partial, state_dict=weights)
    out = tmp_path / "out.png"
    for words, message in (
        (["attention", encoder, RIVER, "--of", "cross", "-o", out], "of='cross'"),
        (["attention", encoder, RIVER, "--layer", 9, "-o", out], "layer=9"),
        (["attention", encoder, RIVER, "-o", tmp_path / "out.pdf"], r"must end in .png or .svg"),
        (["attention", encoder, RIVER, "-o", tmp_path / "no" / "out.png"], "there is no folder"),
        (["attention", tmp_path / "absent", RIVER, "-o", out], "no such file or folder"),
        (["attention", tmp_path, RIVER, "-o", out], "no config.json"),
        (["attention", encoder / "config.json", RIVER, "-o", out], "config.json: a file; weights are wanted"),
        (["positions", broken, "-o", out], "AutoModel cannot open it"),
        (["attention", partial, RIVER, "-o", out], "3 weights of ScratchEncoderModel are missing, layers.1.mlp.down"),
        (["embedding-shift", encoder, "sea", RIVER, "-o", out], "word='sea' is not in the sentence"),
        (["curves", tmp_path, "-o", out], "no metrics of a run"),
    ):
        with pytest.raises(ValueError, match=message):
            command(*words)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            "tokenizer.json",
            lambda tree: tree["model"]["vocab"].update(the="one"),
            "AutoTokenizer cannot open it: Exception",
        ),
        (
            "tokenizer.json",
            lambda tree: tree["model"]["vocab"].update(the=99999),
            "the id 99999, the model's table ends at",
        ),
        ("tokenizer_config.json", lambda tree: tree.update(eos_token={}), "AutoTokenizer cannot open it: .*eos_token"),
        (
            "tokenizer_config.json",
            lambda tree: tree.update(model_max_length="x"),
            "its tokenizer does not work: TypeError",
        ),
        ("generation_config.json", lambda tree: tree.update(output_hidden_states="ü"), "output_hidden_states='ü' must"),
        ("generation_config.json", lambda tree: tree.update(bos_token_id="ü"), "bos_token_id='ü' must be the number"),
    ],
)
def test_a_file_beside_the_weights_that_cannot_be_used_is_refused_in_a_line(folders, tmp_path, file, change, message):
    """The library that reads it raises whatever it likes."""
    folder = tmp_path / "model"
    shutil.copytree(folders["seq2seq" if file == "generation_config.json" else "encoder"], folder)
    tree = json.loads((folder / file).read_text())
    change(tree)
    (folder / file).write_text(json.dumps(tree))
    with pytest.raises(ValueError, match=message):
        command("attention", folder, RIVER, "-o", tmp_path / "out.png")


def test_a_picture_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = pictures.save(pictures.positions(pictures.sinusoidal_code(4, 4)), tmp_path / "picture.png")
    before = path.read_bytes()

    def fail(temporary, **options):
        temporary.write_bytes(b"half")
        raise OSError("disk full")

    figure = pictures.positions(pictures.sinusoidal_code(8, 8))
    monkeypatch.setattr(figure, "savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        pictures.save(figure, path)
    assert path.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == ["picture.png"]
