"""Senses: what is read, the vectors, the score, the command."""

import argparse
import copy
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from hf_scratch_transformer import (
    ScratchDecoderModel,
    ScratchEncoderModel,
    ScratchSeq2SeqForConditionalGeneration,
    cli,
)
from hf_scratch_transformer.files import sha256
from hf_scratch_transformer.insight import senses
from hf_scratch_transformer.insight.senses import Examples, Occurrence
from hf_scratch_transformer.tokenization import config_fields, train_tokenizer
from tests import tiny

SENTENCES = {
    "shore": ["we sat on the bank of the river", "a fisherman slept on the grassy bank", "the bank was wet and muddy"],
    "money": ["she asked the bank for a loan", "the bank closed our account today", "he robbed a bank in the city"],
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    lines = [sentence for some in SENTENCES.values() for sentence in some]
    return train_tokenizer(lines, family="encoder", vocab_size=90, min_frequency=1)


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> ScratchEncoderModel:
    return tiny.model(ScratchEncoderModel, num_hidden_layers=5, **config_fields(tokenizer, "encoder"))


def occurrence(sentence: str, word: str = "bank") -> Occurrence:
    words = tuple(sentence.split())
    return Occurrence(words, words.index(word))


def examples() -> Examples:
    labelled = [(occurrence(text), sense) for sense, some in SENTENCES.items() for text in some]
    return Examples(train=labelled, test=labelled[::-1])


def alone(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, words: tuple[str, ...], position: int, layers: int
) -> torch.Tensor:
    """Written out for one sentence: last layers summed, pieces of the word averaged."""
    inputs = tokenizer(list(words), is_split_into_words=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states[1:][-layers:]
    pieces = [index for index, word in enumerate(inputs.word_ids()) if word == position]
    return torch.stack([state[0, index] for state in states for index in pieces]).sum(0) / len(pieces)


@pytest.mark.parametrize("layers", [1, 4])
def test_vectors_are_those_of_each_sentence_alone(model, tokenizer, layers: int) -> None:
    some = [occurrence(text) for texts in SENTENCES.values() for text in texts] + [
        occurrence("a fisherman", "fisherman")
    ]
    assert len(tokenizer.tokenize("fisherman")) > 1
    vectors = senses.contextual_vectors(model, tokenizer, some, layers, batch_tokens=30)
    for vector, one in zip(vectors, some, strict=True):
        torch.testing.assert_close(
            vector, alone(model, tokenizer, one.words, one.position, layers), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("options", [{"pad_token": "[PAD]", "padding_side": "left"}, {}])
def test_how_a_tokenizer_pads_does_not_matter(model, tokenizer, options) -> None:
    """Those of many language models pad on the left, or not at all."""
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **options)
    some = [occurrence("the bank was wet"), occurrence("a fisherman slept on the grassy bank")]
    expected = senses.contextual_vectors(model, tokenizer, some)
    torch.testing.assert_close(senses.contextual_vectors(model, other, some), expected, atol=1e-5, rtol=1e-5)


def test_special_tokens_can_be_left_out(model, tokenizer) -> None:
    one = occurrence("the bank was wet")
    with torch.no_grad():
        ids = tokenizer("the bank was wet", add_special_tokens=False, return_tensors="pt")["input_ids"]
        states = model(ids).last_hidden_state[0]
    pieces = len(tokenizer.tokenize("the")), len(tokenizer.tokenize("bank"))
    vector = senses.contextual_vectors(model, tokenizer, [one], special_tokens=False)[0]
    torch.testing.assert_close(vector, states[pieces[0] : sum(pieces)].mean(0), atol=1e-5, rtol=1e-5)


def test_a_word_can_be_masked(model, tokenizer) -> None:
    """All of its pieces, as if they were masked in the text; and both readings side by side, weighing as much."""
    some = [occurrence("the bank was wet"), occurrence("a fisherman slept on the grassy bank", "fisherman")]
    masked, shown = (senses.contextual_vectors(model, tokenizer, some, readings=[one]) for one in ("masked", "shown"))
    assert senses.contextual_vectors(model, tokenizer, some).equal(shown)
    for vector, one in zip(masked, some, strict=True):
        inputs = tokenizer(list(one.words), is_split_into_words=True, return_tensors="pt")
        pieces = [index for index, word in enumerate(inputs.word_ids()) if word == one.position]
        inputs["input_ids"][0, pieces] = tokenizer.mask_token_id
        with torch.no_grad():
            states = model(**inputs).last_hidden_state[0]
        torch.testing.assert_close(vector, states[pieces].mean(0), atol=1e-5, rtol=1e-5)
    both = senses.contextual_vectors(model, tokenizer, some, readings=["shown", "masked"])
    cosine = torch.cosine_similarity
    expected = (cosine(shown[0], shown[1], dim=0) + cosine(masked[0], masked[1], dim=0)) / 2
    torch.testing.assert_close(cosine(both[0], both[1], dim=0), expected)


def test_without_a_mask_token_nothing_is_masked(model, tokenizer) -> None:
    without = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, pad_token="[PAD]")
    with pytest.raises(ValueError, match="readings: masked is for a tokenizer with a mask token"):
        senses.contextual_vectors(model, without, [occurrence("the bank was wet")], readings=["masked"])


@pytest.mark.parametrize("special_tokens", [True, False])
def test_the_context_is_the_mean_of_the_sentence(model, tokenizer, special_tokens: bool) -> None:
    """Of all pieces of its words, and of no padding nor `[CLS]`; beside the masked word, weighing as much."""
    some = [occurrence("the bank was wet"), occurrence("a fisherman slept on the grassy bank", "fisherman")]
    vectors = {
        how: senses.contextual_vectors(model, tokenizer, some, special_tokens=special_tokens, readings=how.split("+"))
        for how in ("context", "masked", "masked+context", "context+masked")
    }
    for vector, one in zip(vectors["context"], some, strict=True):
        text = " ".join(one.words)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=special_tokens)["input_ids"]
        with torch.no_grad():
            states = model(ids).last_hidden_state[0]
        states = states[1:-1] if special_tokens else states
        assert len(states) == len(tokenizer.tokenize(text))
        torch.testing.assert_close(vector, states.mean(0), atol=1e-5, rtol=1e-5)
    near = {how: torch.cosine_similarity(*vector, dim=0) for how, vector in vectors.items()}
    torch.testing.assert_close(near["masked+context"], (near["masked"] + near["context"]) / 2)
    torch.testing.assert_close(near["context+masked"], near["masked+context"])


def test_a_sentence_is_read_once_for_the_word_and_its_context(model, tokenizer, monkeypatch) -> None:
    forward, read = model.forward, []
    monkeypatch.setattr(model, "forward", lambda *given, **named: read.append(1) or forward(*given, **named))
    for readings, times in [(["context", "shown"], 1), (["masked"], 1), (["context", "masked"], 2)]:
        senses.contextual_vectors(model, tokenizer, [occurrence("the bank was wet")], readings=readings)
        assert len(read) == times
        read.clear()


def test_vectors_that_are_none_are_refused(model, tokenizer) -> None:
    """Which would be as near to every sense: a score of chance, as if it were one."""
    broken = copy.deepcopy(model)
    with torch.no_grad():
        next(broken.parameters()).fill_(math.nan)
    with pytest.raises(ValueError, match="a vector is not finite"):
        senses.contextual_vectors(broken, tokenizer, [occurrence("the bank")])


@pytest.mark.parametrize("readings", ["masked", ["mask"], [], ["shown", "hidden"], ["shown", "shown"]])
def test_readings_of_other_names_are_refused(model, tokenizer, readings) -> None:
    with pytest.raises(ValueError, match="must be a list of some of shown, masked, context, each once"):
        senses.contextual_vectors(model, tokenizer, [occurrence("the bank was wet")], readings=readings)


@pytest.mark.parametrize("pad", [None, -1, 500, "none at all"])
def test_what_pads_may_be_in_no_table(tokenizer, pad) -> None:
    """As configurations from the Hub may have it; what is masked may be any token."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    native = BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).eval()
    some = [occurrence("the bank was wet"), occurrence("a fisherman slept on the grassy bank")]
    expected = senses.contextual_vectors(native, tokenizer, some)
    if pad == "none at all":
        del native.config.pad_token_id
    else:
        native.config.pad_token_id = pad
    torch.testing.assert_close(senses.contextual_vectors(native, tokenizer, some), expected)


def test_a_long_sentence_is_cut_around_the_word(model, tokenizer) -> None:
    words = ("a",) * 40 + ("bank",) + ("on",) * 40
    vector = senses.contextual_vectors(model, tokenizer, [Occurrence(words, 40)])[0]
    limit = model.config.max_position_embeddings - tokenizer.num_special_tokens_to_add()
    pieces = len(tokenizer.tokenize("a"))
    assert pieces == len(tokenizer.tokenize("on"))
    sides, left = divmod(limit - len(tokenizer.tokenize("bank")), 2 * pieces)
    before = sides + (left >= pieces)
    torch.testing.assert_close(
        vector, alone(model, tokenizer, words[40 - before : 41 + sides], before, 1), atol=1e-5, rtol=1e-5
    )


def test_a_word_alone_is_too_long(model, tokenizer) -> None:
    with pytest.raises(ValueError, match="pieces long; the model takes 32 tokens"):
        senses.contextual_vectors(model, tokenizer, [Occurrence(("sat" * 32,), 0)])


def test_decoders_have_vectors_too(tokenizer) -> None:
    decoder = tiny.model(ScratchDecoderModel, **config_fields(tokenizer, "encoder"))
    some = [one for one, _ in examples().train]
    for vector, one in zip(senses.contextual_vectors(decoder, tokenizer, some), some, strict=True):
        torch.testing.assert_close(vector, alone(decoder, tokenizer, one.words, one.position, 1), atol=1e-5, rtol=1e-5)


def test_a_sentence_seen_in_training_is_known_again(model, tokenizer) -> None:
    one_each = [(occurrence(some[0]), sense) for sense, some in SENTENCES.items()]
    found = senses.score(model, tokenizer, Examples(one_each, one_each * 3))
    assert (found.accuracy, found.macro_f1) == (100, 100)
    assert (found.senses, found.train, found.test, found.most_frequent) == (2, 2, 6, 50)


def test_senses_swapped_between_training_and_test_are_all_wrong(model, tokenizer) -> None:
    (shore, a), (money, b) = [(occurrence(some[0]), sense) for sense, some in SENTENCES.items()]
    found = senses.score(model, tokenizer, Examples([(shore, a), (money, b)], [(shore, b), (money, a)]))
    assert (found.accuracy, found.macro_f1) == (0, 0)


def test_training_sentences_are_told_apart_each_by_the_others(model, tokenizer) -> None:
    train = examples().train
    answers = senses.answers(model, tokenizer, Examples(train, []).leaving_one_out())
    for place, (one, answer) in enumerate(zip(train, answers, strict=True)):
        others = Examples(train[:place] + train[place + 1 :], [one])
        assert [answer] == senses.answers(model, tokenizer, others)
    one_each = [(occurrence(some[0]), sense) for sense, some in SENTENCES.items()]
    swapped = senses.answers(model, tokenizer, Examples(one_each, []).leaving_one_out())
    assert swapped == [sense for _, sense in reversed(one_each)], "the only one of its sense is of another"


@pytest.mark.parametrize("left_out", [False, True])
def test_no_dimension_outweighs_the_others_when_all_have_unit_variance(
    model, tokenizer, monkeypatch, left_out: bool
) -> None:
    """One of three says the sense, another says much of nothing, the third never changes."""
    marks = {"shore": 0.1, "money": -0.1}
    noise = dict(zip((one for one, _ in examples().train), [5.0, -5.0, 4.0, -4.0, 4.5, -4.5], strict=True))
    meant = {one: [marks[sense], noise[one], 1.0] for one, sense in examples().train}
    train = examples().train
    monkeypatch.setattr(senses, "contextual_vectors", lambda _, __, some: torch.tensor([meant[one] for one in some]))
    meant[train[0][0]][2] += 1e-7  # by rounding
    given = Examples(train, []).leaving_one_out() if left_out else Examples(train, [(one, "") for one, _ in train])
    assert senses.answers(model, tokenizer, given) != [sense for _, sense in train]
    assert senses.answers(model, tokenizer, given, unit_variance=True) == [sense for _, sense in train]
    alone = Examples(train[:1], train[:1])
    assert senses.answers(model, tokenizer, alone, unit_variance=True) == ["shore"], "nothing varies"


def test_macro_f1_by_hand() -> None:
    # a: precision 2/3, recall 2/2; b: 1/1, 1/2; c: never guessed.
    assert senses.macro_f1("aaab", "aabb") == pytest.approx((2 * (2 / 3) / (2 / 3 + 1) + 2 * 0.5 / 1.5) / 2)
    assert senses.macro_f1("aab", "abc") == pytest.approx((2 * 0.5 * 1 / 1.5 + 0 + 0) / 3)


def coarse_wsd(folder: Path) -> Path:
    """The examples in the format of CoarseWSD-20."""
    folder.mkdir(parents=True)
    names = list(SENTENCES)
    (folder / "classes_map.txt").write_text(json.dumps({str(i): name for i, name in enumerate(names)}))
    for split in ("train", "test"):
        some = getattr(examples(), split)
        lines = [f"{one.position}\t{' '.join(one.words)}\n" for one, _ in some]
        (folder / f"{split}.data.txt").write_text("".join(lines))
        (folder / f"{split}.gold.txt").write_text("".join(f"{names.index(sense)}\n" for _, sense in some))
    return folder


def table(path: Path, rows: list[str] | None = None) -> Path:
    lines = [
        f"bank\t{split}\t{sense}\t\t{' '.join(one.words)}"
        for split in ("train", "test")
        for one, sense in getattr(examples(), split)
    ]
    path.write_text("\n".join(["word\tsplit\tsense\tposition\tsentence", *(lines if rows is None else rows)]) + "\n")
    return path


def test_both_formats_read_the_same(tmp_path: Path) -> None:
    folder = coarse_wsd(tmp_path / "all" / "bank")
    expected = {"bank": examples()}
    assert senses.read(folder) == senses.read(folder.parent) == senses.read(table(tmp_path / "a.tsv")) == expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("bank\tvalid\ta\t0\tbank", "line 2: split='valid' must be train or test"),
        ("bank\ttrain\ta\t5\tthe bank", "line 2: position=5 is not a word of a sentence of 2"),
        ("bank\ttrain\ta\tx\tthe bank", "line 2: .*'x'"),
        ("bank\ttrain\ta\t\tthe bench", "line 2: 'bank' stands 0 times in 'the bench'"),
        ("bank\ttrain\ta\t\tbank to bank", "line 2: 'bank' stands 2 times"),
        ("bank\ttrain", "line 2: 'bank' stands 0 times in ''"),
    ],
)
def test_rows_that_cannot_be_read_are_named(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        senses.read(table(tmp_path / "a.tsv", [row]))


def test_data_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no tab-separated file, nor a folder"):
        senses.read(tmp_path / "nowhere")
    (tmp_path / "a.tsv").write_text("word\tsense\n")
    with pytest.raises(ValueError, match="no column position, sentence, split"):
        senses.read(tmp_path / "a.tsv")
    for damage, said in ((b"\xff\xfe", "can't decode"), (b"word\t" + b"x" * 200_000 + b"\n", "field larger than")):
        (tmp_path / "a.tsv").write_bytes(damage)
        with pytest.raises(ValueError, match=f"a.tsv: .*{said}"):
            senses.read(tmp_path / "a.tsv")
    with pytest.raises(ValueError, match="a.tsv: no sentence follows its first line"):
        senses.read(table(tmp_path / "a.tsv", []))
    folder = coarse_wsd(tmp_path / "bank")
    (folder / "test.gold.txt").write_text("0\n")
    with pytest.raises(ValueError, match="6 sentences in test.data.txt, 1 senses in test.gold.txt"):
        senses.read(folder)
    for labels in ('["a", "b"]', '{"0": 1}'):
        (folder / "classes_map.txt").write_text(labels)
        with pytest.raises(ValueError, match="classes_map.txt must name each sense"):
            senses.read(folder)
    (folder / "classes_map.txt").write_text("{")
    with pytest.raises(ValueError, match="classes_map.txt: "):
        senses.read(folder)


def test_the_command(
    model, tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    data = table(tmp_path / "a.tsv")
    parser = argparse.ArgumentParser()
    senses.add_commands(parser.add_subparsers())

    def run(*words: str) -> str:
        arguments = parser.parse_args(["senses", str(tmp_path / "model"), *words])
        arguments.run(arguments)
        return capsys.readouterr().out

    expected = senses.score(model, tokenizer, examples(), last_layers=2)
    printed = json.loads(run(str(data), "--last-layers", "2", "--json"))
    assert printed["words"]["bank"] == vars(expected)
    assert printed["mean"]["macro_f1"] == expected.macro_f1
    assert printed["weights"] == {"model.safetensors": sha256(tmp_path / "model" / "model.safetensors")}
    assert f"{expected.macro_f1:.1f}" in run(str(data), "--last-layers", "2")
    low, high = printed["macro_f1_interval"]
    assert low <= expected.macro_f1 <= high
    assert f"macro_f1: {expected.macro_f1:.4g} (95%: {low:.4g} to {high:.4g})" in run(str(data), "--last-layers", "2")
    bare = senses.score(model, tokenizer, examples(), special_tokens=False)
    assert json.loads(run(str(data), "--no-special-tokens", "--json"))["words"]["bank"] == vars(bare)
    left_out = senses.score(model, tokenizer, examples().leaving_one_out())
    assert left_out.test == len(examples().train)
    assert json.loads(run(str(data), "--leave-one-out", "--json"))["words"]["bank"] == vars(left_out)
    assert f"training macro_f1: {left_out.macro_f1:.4g} (95%" in run(str(data), "--leave-one-out")
    masked = senses.score(model, tokenizer, examples().leaving_one_out(), readings=["masked"])
    assert masked.macro_f1 != left_out.macro_f1
    printed = json.loads(run("--read", "masked", str(data), "--leave-one-out", "--json"))
    assert printed["words"]["bank"] == vars(masked)
    options = {"last_layers": 1, "special_tokens": True, "readings": ["masked"], "unit_variance": False}
    assert printed["options"] == options | {"leave_one_out": True}
    printed = json.loads(run("--unit-variance", str(data), "--json"))
    assert printed["words"]["bank"] == vars(senses.score(model, tokenizer, examples(), unit_variance=True))
    assert printed["options"]["unit_variance"]
    answers, read = senses.answers, []
    monkeypatch.setattr(
        senses, "answers", lambda *given, **more: read.append(more["readings"]) or answers(*given, **more)
    )
    run(str(data), "--read", "masked+shown"), run(str(data))
    assert read == [["masked", "shown"], ["shown"]]
    for wrong in ("shown+hidden", "shown+shown", "masked+", ""):
        with pytest.raises(SystemExit, match="2"):
            run(str(data), "--read", wrong)
        said = f"readings={wrong.split('+')} must be a list of some of shown, masked, context, each once, joined by +"
        assert f"argument --read: {said}" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--last-layers 0"):
        run(str(data), "--last-layers", "0")
    with pytest.raises(ValueError, match="last_layers=0 must be 1 to 5, which the model has"):
        senses.contextual_vectors(model, tokenizer, [examples().train[0][0]], last_layers=0)
    with pytest.raises(ValueError, match="last_layers=9 must be 1 to 5, which the model has"):
        run(str(data), "--last-layers", "9")
    with pytest.raises(ValueError, match=r"a.tsv, bank: 1 training and 0 test sentences"):
        run(str(table(data, ["bank\ttrain\ta\t1\tthe bank"])))


@pytest.mark.parametrize("name", ["None", "", "cpu:9", "meta", "cuda:99"])
def test_a_device_that_is_not_here_is_named(name: str) -> None:
    assert senses.open_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match=f"--device {name}: not here; there is cpu"):
        senses.open_device(name)


def test_a_translator_has_not_one_vector_for_a_word(tokenizer, tmp_path: Path, command) -> None:
    tiny.model(ScratchSeq2SeqForConditionalGeneration).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    assert "model reads and writes: it is encoders and decoders" in command(tmp_path / "model")


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """`scratch-transformer senses FOLDER`, on sentences of its own: what it prints of an error."""
    data = table(tmp_path / "a.tsv")

    def run(folder: Path, *words: str) -> str:
        assert cli.main(["senses", str(folder), str(data), *words]) == 2
        return capsys.readouterr().err

    return run


def test_a_model_with_weights_missing_is_refused(model, tokenizer, tmp_path: Path, command) -> None:
    """They would be drawn at random, and the score be that of chance."""
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    lost = sorted(name for name in weights if "layers.2." in name)
    save_file({name: weights[name] for name in weights if name not in lost}, tmp_path / "model" / "model.safetensors")
    said = command(tmp_path / "model")
    assert f"{len(lost)} weights of ScratchEncoderModel are missing, {lost[0]} first" in said


def test_code_of_a_repository_is_run_where_that_is_asked_for_and_never_asked_about(
    model, tokenizer, tmp_path: Path, command, monkeypatch, capsys
) -> None:
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "strange.py").write_text(
        "from transformers import BertConfig, BertModel\n\n\n"
        "class StrangeConfig(BertConfig):\n    model_type = 'strange'\n\n\n"
        "class StrangeModel(BertModel):\n    config_class = StrangeConfig\n"
    )
    auto_map = {"AutoConfig": "strange.StrangeConfig", "AutoModel": "strange.StrangeModel"}
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
    )
    BertModel(config).save_pretrained(tmp_path / "model")
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(
        json.dumps(written | {"model_type": "strange", "auto_map": auto_map})
    )
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    assert "trust_remote_code=True" in command(tmp_path / "model")
    assert cli.main(["senses", str(tmp_path / "model"), str(tmp_path / "a.tsv"), "--json", "--trust-remote-code"]) == 0
    assert json.loads(capsys.readouterr().out)["words"]["bank"]["test"] == 6


def test_the_interval_is_that_of_the_sentences() -> None:
    """Of a word of which half of very many sentences are told right; of one that is always right; and of both."""
    half = ["a", "b"] * 200, ["a", "a", "b", "b"] * 100
    right = ["a", "b"] * 3, ["a", "b"] * 3
    low, high = senses.interval([half])
    assert 50 - low == pytest.approx(100 * 1.96 * 0.5 / 20, rel=0.1) and high - 50 == pytest.approx(50 - low, rel=0.15)
    assert senses.interval([right]) == [100, 100]
    both = senses.interval([half, right])
    assert both == pytest.approx([(100 + low) / 2, (100 + high) / 2], abs=0.5)
