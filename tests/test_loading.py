"""Loading and saving: with the package imported, in a process that has never heard of it, and everything else that a
user of DistilBERT does to a checkpoint without thinking about it."""

import ast
import copy
import inspect
import json
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, PreTrainedModel, pipeline

import hf_scratch_transformer as scratch
from hf_scratch_transformer.configuration_scratch import POSITIONS
from hf_scratch_transformer.tokenization import config_fields, train_tokenizer
from tests import tiny

PACKAGE = Path(scratch.__file__).parent
COMMON = tuple(
    f"{name}_scratch.py" for name in ("configuration", "heads", "layers", "norms", "ops", "stack", "unpadding")
)
FAMILY_FILES = tuple(f"modeling_scratch_{family}.py" for family in tiny.FAMILIES)
WRITING = ("cache_scratch.py", "generation_scratch.py")  # of families that write text
SHIPPED = (*COMMON, *WRITING, *FAMILY_FILES)


def shipped(model_class: type[PreTrainedModel]) -> set[str]:
    """The files that a saved model of this class carries: its family's and no other's."""
    family = tiny.family(model_class)
    writing = () if family == "encoder" else WRITING
    return {*COMMON, *writing, f"modeling_scratch_{family}.py"}


# The article's two sentences, and what else a vocabulary needs.
FISHING = "Write a poem about a man fishing on a river bank."
MONEY = "Write a poem about a man withdrawing money from a bank."


BACKBONE = {tiny.family(backbone): backbone for backbone in tiny.BACKBONES}


def names(value: Any) -> str | None:
    """Test ids: classes by name."""
    return getattr(value, "__name__", None)


def forward_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    inputs = tiny.inputs(model)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tiny.tokens(model.config.decoder_vocab_size, 3, 5, seed=1)
    return inputs


@torch.no_grad()
def outputs(model: PreTrainedModel, **kwargs: Any) -> dict[str, Tensor]:
    """Every tensor that a model gives back, by name."""
    items = model.eval()(**forward_inputs(model), **kwargs).items()
    return {name: value.clone() for name, value in items if isinstance(value, Tensor)}


def assert_same(got: PreTrainedModel, expected: PreTrainedModel) -> None:
    """The same weights to the bit, and the same outputs: to rounding, which in a product by one column depends on
    where in memory the weights lie."""
    weights, expected_weights = got.state_dict(), expected.state_dict()
    assert weights.keys() == expected_weights.keys()
    for name, tensor in expected_weights.items():
        assert tensor.isfinite().all() and torch.equal(weights[name], tensor), name
    torch.testing.assert_close(outputs(got), outputs(expected), atol=1e-6, rtol=1e-6)


def head_weights(model: PreTrainedModel) -> set[str]:
    """Names of the weights that are no part of the backbone, tied ones left out."""
    if model.base_model is model:
        return set()
    return {name for name, _ in model.named_parameters() if not name.startswith(f"{model.base_model_prefix}.")}


def auto_classes(model_class: type[PreTrainedModel]) -> dict[str, type[PreTrainedModel]]:
    """{name of an Auto class: the class of the same family that it opens}"""
    auto_map = model_class.config_class._auto_map
    return {auto: getattr(scratch, name.split(".")[1]) for auto, name in auto_map.items() if auto != "AutoConfig"}


# With the package imported


@pytest.mark.parametrize("model_class", tiny.MODELS, ids=names)
def test_every_auto_class_opens_every_checkpoint(model_class: type[PreTrainedModel], tmp_path: Path) -> None:
    model = tiny.model(model_class)
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is type(model.config)
    for auto, expected_class in auto_classes(model_class).items():
        opened, info = getattr(transformers, auto).from_pretrained(tmp_path, output_loading_info=True)
        assert type(opened) is expected_class
        missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
        assert not info["mismatched_keys"] and not info["error_msgs"]
        if expected_class is model_class:
            assert not missing and not unexpected
            assert_same(opened, model)
        elif {tiny.task(expected_class), tiny.task(model_class)} != {"SequenceClassification", "TokenClassification"}:
            # Nothing of the backbone is missing, and no head passes for one of another task.
            assert missing == head_weights(opened) and unexpected == head_weights(model)
        assert_same(opened.base_model, model.base_model)
        assert type(getattr(transformers, auto).from_config(model.config)) is expected_class
        assert not opened.training


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("model_class", tiny.LANGUAGE_MODELS, ids=names)
def test_the_head_of_a_base_checkpoint(model_class: type[PreTrainedModel], tie: bool, tmp_path: Path) -> None:
    """A tied head comes with the table; an untied one has to be trained, and the load says so."""
    base = tiny.model(BACKBONE[tiny.family(model_class)], tie_word_embeddings=tie)
    base.save_pretrained(tmp_path)
    opened, info = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == (set() if tie else {"lm_head.weight"})
    assert (opened.lm_head.weight is opened.get_input_embeddings().weight) == tie
    assert opened.lm_head.weight.std() > 0.1  # drawn, not left as memory was found


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([FISHING, MONEY] * 2, family="encoder")


def test_pipelines(tokenizer: Any, tmp_path: Path) -> None:
    fields = config_fields(tokenizer, "encoder")
    for model_class, task, text in (
        (scratch.ScratchEncoderForMaskedLM, "fill-mask", "Write a [MASK] about a man."),
        (scratch.ScratchEncoderForSequenceClassification, "text-classification", FISHING),
        (scratch.ScratchEncoderForTokenClassification, "token-classification", FISHING),
        (scratch.ScratchEncoderModel, "feature-extraction", FISHING),
        (scratch.ScratchDecoderForSequenceClassification, "text-classification", FISHING),
        (scratch.ScratchDecoderForCausalLM, "text-generation", FISHING),
    ):
        folder = tmp_path / model_class.__name__
        model = tiny.model(model_class, **fields)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        run = pipeline(task, model=str(folder), device="cpu")
        assert type(run.model) is model_class
        results = {
            "fill-mask": lambda r: len(r) == 5 and all("[MASK]" not in guess["sequence"] for guess in r),
            "text-classification": lambda r: r[0]["label"] in ("LABEL_0", "LABEL_1") and 0.5 <= r[0]["score"] <= 1,
            "token-classification": lambda r: [word["word"] for word in r] == tokenizer.tokenize(FISHING),
            "feature-extraction": lambda r: torch.tensor(r).shape == (1, len(tokenizer(FISHING).input_ids), 32),
            "text-generation": lambda r: len(r[0]["generated_token_ids"]) == len(tokenizer(FISHING).input_ids) + 3,
        }
        options = {"max_new_tokens": 3, "return_tensors": True} if task == "text-generation" else {}
        assert results[task](run(text, **options)), task


# In a process that cannot import the package


def elsewhere(stranger: Callable[..., None], folder: Path, *arguments: Any) -> None:
    """Run a function of this file in a fresh interpreter that cannot import this package, with an empty Hub cache.

    It is sent as text, so that it must import what it needs itself, and has its arguments from JSON.
    """

    class Refuse:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name.partition(".")[0] == "hf_scratch_transformer":
                raise ImportError(f"{name} is not installed here")

    script = "\n".join(
        [
            "import json, sys",
            "from typing import Any",
            textwrap.dedent(inspect.getsource(Refuse)),
            "sys.meta_path.insert(0, Refuse())",
            inspect.getsource(stranger),
            f"{stranger.__name__}(*json.loads(sys.argv[1]))",
            "assert not [name for name in sys.modules if name.startswith('hf_scratch_transformer')]",
        ]
    )
    folder.mkdir(exist_ok=True)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    # -I: neither the working folder nor PYTHONPATH can offer the package.
    result = subprocess.run(
        [sys.executable, "-I", "-c", script, json.dumps(arguments, default=str)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-4000:]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`checkpoints/NAME` from every model class, and beside them what a stranger can compare with: the inputs and
    outputs of each, those of its backbone alone, and inputs with labels to train on."""
    home = tmp_path_factory.mktemp("home")
    for kind in ("inputs", "outputs", "backbone", "labelled"):
        (home / kind).mkdir()
    for model_class in tiny.MODELS:
        name = model_class.__name__
        model = tiny.model(model_class)
        model.save_pretrained(home / "checkpoints" / name)
        save_file(forward_inputs(model), home / "inputs" / name)
        save_file(outputs(model), home / "outputs" / name)
        save_file(outputs(model.base_model), home / "backbone" / name)
        if model_class in tiny.HEADS:
            inputs = tiny.inputs(model)
            save_file(inputs | tiny.labels(model, inputs), home / "labelled" / name)
    return home


def open_train_and_save_again(home: str, copies: str, auto_maps: dict[str, dict[str, str]]) -> None:
    """What a stranger does with the checkpoints: open each with every Auto class of its family, fine-tune every head on
    its backbone, save everything, with the outputs to expect."""
    from pathlib import Path

    import torch
    import transformers
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, Trainer, TrainingArguments

    def run(model: Any, inputs: Any) -> dict[str, Any]:
        with torch.no_grad():
            items = model.eval()(**load_file(inputs)).items()
        return {name: value.clone() for name, value in items if isinstance(value, torch.Tensor)}

    def assert_same(model: Any, inputs: str, expected: str, where: str) -> None:
        torch.testing.assert_close(
            run(model, inputs), load_file(expected), atol=1e-6, rtol=1e-6, msg=lambda message: f"{where}: {message}"
        )

    for checkpoint in sorted(Path(home, "checkpoints").iterdir()):
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=True)
        assert type(config).__module__.startswith("transformers_modules.")
        auto_map = auto_maps[config.model_type]
        backbone = auto_map["AutoModel"]
        for auto_class, name in auto_map.items():
            where = f"{checkpoint.name} by {auto_class}"
            model, info = getattr(transformers, auto_class).from_pretrained(
                checkpoint, trust_remote_code=True, output_loading_info=True
            )
            assert type(model).__name__ == name, where
            backbone_keys = model.base_model.state_dict().keys()
            for kind in ("missing_keys", "unexpected_keys"):
                assert not {key.removeprefix("model.") for key in info[kind]} & backbone_keys, (where, kind, info[kind])
            stored = load_file(checkpoint / "model.safetensors")
            weights = model.base_model.state_dict()
            for key, tensor in stored.items():
                key = key if checkpoint.name == backbone else key.removeprefix("model.")
                assert key not in weights or torch.equal(weights[key], tensor), (where, key)
            assert_same(model.base_model, f"{home}/inputs/{backbone}", f"{home}/backbone/{checkpoint.name}", where)
            if name == checkpoint.name:
                assert_same(model, f"{home}/inputs/{name}", f"{home}/outputs/{name}", where)
            if checkpoint.name not in (name, backbone) or Path(copies, f"{name}-from-{checkpoint.name}").exists():
                continue
            if checkpoint.name == backbone != name:
                batch = load_file(f"{home}/labelled/{name}")
                rows = [{key: value[row] for key, value in batch.items()} for row in range(3)]
                arguments = TrainingArguments(
                    output_dir=Path(copies, f"training-{name}"),
                    max_steps=3,
                    per_device_train_batch_size=3,
                    learning_rate=3e-3,
                    logging_steps=1,
                    save_steps=3,
                    report_to="none",
                    disable_tqdm=True,
                    use_cpu=True,
                )
                trainer = Trainer(model, arguments, train_dataset=rows)
                trainer.train()
                losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
                assert len(losses) == 3 and losses[2] < losses[0], (where, losses)
                folder = Path(arguments.output_dir, "checkpoint-3").rename(Path(copies, f"{name}-trained"))
                save_file(run(model, f"{home}/inputs/{name}"), folder / "outputs")
            folder = Path(copies, f"{name}-from-{checkpoint.name}")
            model.save_pretrained(folder)
            save_file(run(model, f"{home}/inputs/{name}"), folder / "outputs")


def open_copies(home: str, copies: list[str], auto_classes: dict[str, str]) -> None:
    """What the next stranger does, who has only what the first one saved."""
    import json
    from pathlib import Path

    import torch
    import transformers
    from safetensors.torch import load_file

    for folder in map(Path, copies):
        (name,) = json.loads((folder / "config.json").read_text())["architectures"]
        model, info = getattr(transformers, auto_classes[name]).from_pretrained(
            folder, trust_remote_code=True, output_loading_info=True
        )
        assert type(model).__name__ == name, folder.name
        assert not info["missing_keys"] and not info["unexpected_keys"], (folder.name, info)
        weights = model.state_dict()
        stored = load_file(folder / "model.safetensors")
        assert stored and all(torch.equal(weights[key], tensor) for key, tensor in stored.items()), folder.name
        with torch.no_grad():
            got = model(**load_file(f"{home}/inputs/{name}"))
        for key, value in load_file(folder / "outputs").items():
            torch.testing.assert_close(got[key], value, atol=1e-6, rtol=1e-6)


def test_strangers_open_train_and_pass_on_every_checkpoint(home: Path, tmp_path: Path) -> None:
    maps = {m.config_class.model_type: auto_classes(m) for m in tiny.BACKBONES}
    by_name = {kind: {auto: c.__name__ for auto, c in classes.items()} for kind, classes in maps.items()}
    copies = tmp_path / "copies"
    copies.mkdir()
    elsewhere(open_train_and_save_again, tmp_path / "first", home, copies, by_name)
    # As a folder travels: away from where it was made, which is gone.
    travelled = tmp_path / "travelled"
    shutil.move(copies, travelled)
    shutil.rmtree(tmp_path / "first")
    shutil.move(home / "checkpoints", tmp_path / "hidden")
    folders = sorted(path for path in travelled.iterdir() if not path.name.startswith("training-"))
    # A copy of each, a head from each backbone's checkpoint, and that head trained.
    assert len(folders) == len(tiny.MODELS) + 2 * len(tiny.HEADS)
    for folder in folders:
        original_name = json.loads((folder / "config.json").read_text())["architectures"][0]
        for name in shipped(getattr(scratch, original_name)):
            assert (folder / name).read_bytes() == (PACKAGE / name).read_bytes()
        saved = json.loads((folder / "config.json").read_text())
        original = json.loads((tmp_path / "hidden" / saved["architectures"][0] / "config.json").read_text())
        assert saved["auto_map"] == original["auto_map"]
    openers = {name: auto for classes in by_name.values() for auto, name in classes.items()}
    try:
        elsewhere(open_copies, tmp_path / "second", home, folders, openers)
    finally:
        shutil.move(tmp_path / "hidden", home / "checkpoints")


# The article's cell


def article(checkpoint: str, **trust: bool) -> None:
    """The founding article's code, which loads DistilBERT, with another checkpoint."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModel.from_pretrained(checkpoint, **trust)

    learned, contextual = [], []
    for sentence in (
        "Write a poem about a man fishing on a river bank.",
        "Write a poem about a man withdrawing money from a bank.",
    ):
        tokens = tokenizer(sentence, return_tensors="pt")
        token_ids = tokens["input_ids"]
        words = tokenizer.convert_ids_to_tokens(token_ids[0])
        with torch.no_grad():
            embeddings = model.embeddings.word_embeddings(token_ids)
            output = model(**tokens)
        assert output.last_hidden_state.shape == embeddings.shape == (1, len(words), model.config.hidden_size)
        assert words[0] == "[CLS]" and words[-1] == "[SEP]"
        bank = words.index("bank")
        learned.append(embeddings[0, bank])
        contextual.append(output.last_hidden_state[0, bank])
    assert torch.equal(*learned)
    assert torch.cosine_similarity(*contextual, dim=0) < 0.99
    assert not torch.allclose(*contextual, atol=1e-2)


def article_of_a_stranger(checkpoint: str, code: str) -> None:
    scope: dict[str, Any] = {}
    exec(code, scope)
    scope["article"](checkpoint, trust_remote_code=True)


def test_the_article_runs_with_another_checkpoint(tokenizer: Any, tmp_path: Path) -> None:
    checkpoint = tmp_path / "contextual"
    tiny.model(scratch.ScratchEncoderForMaskedLM, **config_fields(tokenizer, "encoder")).save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    article(str(checkpoint))
    elsewhere(article_of_a_stranger, tmp_path / "elsewhere", checkpoint, inspect.getsource(article))


# What DistilBERT's users also rely on


@pytest.mark.parametrize("model_class", tiny.MODELS, ids=names)
def test_input_embeddings_can_be_read_and_replaced(model_class: type[PreTrainedModel]) -> None:
    model = tiny.model(model_class)
    table = model.get_input_embeddings()
    assert isinstance(table, torch.nn.Embedding) and table.weight.shape == (40, 32)
    assert table is model.base_model.get_input_embeddings()
    before = outputs(model)
    other = torch.nn.Embedding(40, 32, padding_idx=0)
    torch.nn.init.normal_(other.weight)
    model.set_input_embeddings(other)
    assert model.get_input_embeddings() is other
    assert not any(torch.equal(value, before[name]) for name, value in outputs(model).items())
    if model.config.is_encoder_decoder:
        assert model.get_decoder().get_input_embeddings() is other


@pytest.mark.parametrize("size", [47, 33])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("model_class", tiny.MODELS, ids=names)
def test_resize_token_embeddings(model_class: type[PreTrainedModel], tie: bool, size: int, tmp_path: Path) -> None:
    model = tiny.model(model_class, tie_word_embeddings=tie)
    old = model.get_input_embeddings().weight.detach().clone()
    table = model.resize_token_embeddings(size)
    kept = min(size, 40)
    assert table is model.get_input_embeddings() and table.weight.shape == (size, 32)
    assert torch.equal(table.weight[:kept], old[:kept]) and not table.weight[0].any()
    assert model.config.vocab_size == size and getattr(model.config, "decoder_vocab_size", size) == size
    head = model.get_output_embeddings()
    if model_class in tiny.LANGUAGE_MODELS:
        assert head.weight.shape == (size, 32) and (head.weight is table.weight) == tie
    model.save_pretrained(tmp_path)
    assert_same(model_class.from_pretrained(tmp_path), model)


@pytest.mark.parametrize("tie", [True, False])
def test_resize_source_and_target_vocabularies_apart(tie: bool, tmp_path: Path) -> None:
    model = tiny.model(
        scratch.ScratchSeq2SeqForConditionalGeneration,
        vocab_size=40,
        decoder_vocab_size=30,
        share_encoder_decoder_embeddings=False,
        tie_word_embeddings=tie,
    )
    for resize, size, expected in (
        (model.resize_token_embeddings, 50, (50, 30)),
        (model.resize_decoder_token_embeddings, 35, (50, 35)),
        (model.resize_token_embeddings, 20, (20, 35)),
    ):
        resize(size)
        source, target = model.get_encoder().get_input_embeddings(), model.get_decoder().get_input_embeddings()
        assert (source.num_embeddings, target.num_embeddings) == expected
        assert (model.config.vocab_size, model.config.decoder_vocab_size) == expected
        assert model.lm_head.out_features == len(model.lm_head.weight) == expected[1]
        assert (model.lm_head.weight is target.weight) == tie
    model.save_pretrained(tmp_path)
    assert_same(type(model).from_pretrained(tmp_path), model)


@pytest.mark.parametrize("size", [48, 16])
@pytest.mark.parametrize("model_class", tiny.MODELS, ids=names)
def test_resize_position_embeddings(model_class: type[PreTrainedModel], size: int, tmp_path: Path) -> None:
    model = tiny.model(model_class, position_embedding_type="learned")
    old = model.get_position_embeddings().weight.detach().clone()
    before = outputs(model)
    model.resize_position_embeddings(size)
    new = model.get_position_embeddings().weight
    kept = min(size, 32)
    assert new.shape == (size, 32) and torch.equal(new[:kept], old[:kept])
    assert model.config.max_position_embeddings == size
    torch.testing.assert_close(outputs(model), before)
    long = {"input_ids": tiny.tokens(40, 1, size)}
    if model.config.is_encoder_decoder:
        long["decoder_input_ids"] = long["input_ids"]
    if tiny.task(model_class) == "MultipleChoice":
        long["input_ids"] = long["input_ids"][None]
    with torch.no_grad():
        assert model(**long)[0].isfinite().all()
    model.save_pretrained(tmp_path)
    assert_same(model_class.from_pretrained(tmp_path), model)


@pytest.mark.parametrize("model_class", tiny.MODELS, ids=names)
def test_hidden_states_attentions_and_tuples(model_class: type[PreTrainedModel]) -> None:
    model = tiny.model(model_class)
    inputs = forward_inputs(model)
    with torch.no_grad():
        plain = model(**inputs)
        full = model(**inputs, output_hidden_states=True, output_attentions=True)
        as_tuple = model(**inputs, return_dict=False)
    assert isinstance(as_tuple, tuple) and len(as_tuple) == len(plain)
    for value, expected in zip(as_tuple, plain.values(), strict=True):
        assert not isinstance(expected, Tensor) or torch.equal(value, expected)
    batch = inputs["input_ids"].flatten(0, -2).shape[0]
    sides = {"": (7, 7, 2)}
    if model.config.is_encoder_decoder:
        sides = {"encoder_": (7, 7, 1), "decoder_": (5, 5, 2)}
        assert [w.shape for w in full.cross_attentions] == [(batch, 4, 5, 7)] * 2
    for side, (queries, keys, layers) in sides.items():
        states, weights = full[f"{side}hidden_states"], full[f"{side}attentions"]
        assert [x.shape for x in states] == [(batch, queries, 32)] * (layers + 1)
        assert [w.shape for w in weights] == [(batch, 4, queries, keys)] * layers
        torch.testing.assert_close(weights[0].sum(-1), torch.ones(batch, 4, queries))
    with torch.no_grad():
        backbone = model.base_model(**{k: v.flatten(0, -2) if v.ndim == 3 else v for k, v in inputs.items()})
    last = full.decoder_hidden_states[-1] if model.config.is_encoder_decoder else full.hidden_states[-1]
    torch.testing.assert_close(last, backbone.last_hidden_state, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model_class", tiny.MODELS, ids=names)
def test_ways_of_giving_the_input(model_class: type[PreTrainedModel]) -> None:
    """By position, as embeddings, and with the segment ids that BERT's tokenizer makes."""
    model = tiny.model(model_class)
    inputs = forward_inputs(model)
    rest = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
    with torch.no_grad():
        expected = model(**inputs)[0]
        assert torch.equal(model(inputs["input_ids"], inputs["attention_mask"], **rest)[0], expected)
        embeddings = model.get_input_embeddings()(inputs["input_ids"])
        assert torch.equal(
            model(inputs_embeds=embeddings, attention_mask=inputs["attention_mask"], **rest)[0], expected
        )
        segments = torch.ones_like(inputs["input_ids"])
        assert torch.equal(model(**inputs, token_type_ids=segments)[0], expected)


@pytest.mark.parametrize(
    "model_class",
    [m for m in tiny.HEADS if tiny.task(m) in ("SequenceClassification", "TokenClassification")],
    ids=names,
)
def test_labels_have_names_and_a_number(model_class: type[PreTrainedModel], tmp_path: Path) -> None:
    tiny.model(BACKBONE[tiny.family(model_class)]).save_pretrained(tmp_path / "base")
    assert model_class.from_pretrained(tmp_path / "base", num_labels=5).classifier.out_features == 5
    labels = {0: "bad", 1: "fair", 2: "good"}
    model = model_class.from_pretrained(
        tmp_path / "base", id2label=labels, label2id={name: index for index, name in labels.items()}
    )
    assert model.classifier.out_features == model.config.num_labels == 3
    model.save_pretrained(tmp_path / "labelled")
    opened = model_class.from_pretrained(tmp_path / "labelled")
    assert opened.config.id2label == labels and opened.config.label2id["good"] == 2
    assert_same(opened, model)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        model_class.from_pretrained(tmp_path / "labelled", num_labels=2)
    smaller = model_class.from_pretrained(tmp_path / "labelled", num_labels=2, ignore_mismatched_sizes=True)
    assert smaller.classifier.out_features == 2
    assert_same(smaller.base_model, model.base_model)


@pytest.mark.parametrize("model_class", tiny.MODELS, ids=names)
def test_deepcopy_and_pickle(model_class: type[PreTrainedModel]) -> None:
    model = tiny.model(model_class)
    weight = model.get_input_embeddings().weight.detach().clone()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(twin, model)
        with torch.no_grad():
            twin.get_input_embeddings().weight.zero_()
        if twin.get_output_embeddings() is not None:  # still tied to its own table
            assert not twin.get_output_embeddings().weight.any()
        assert torch.equal(model.get_input_embeddings().weight, weight)
    assert pickle.loads(pickle.dumps(model.config)).to_dict() == model.config.to_dict()


# Numbers of half the size, empty models, files


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("model_class", tiny.MODELS, ids=names)
def test_half_precision(model_class: type[PreTrainedModel], dtype: torch.dtype, tmp_path: Path) -> None:
    for positions in ("rotary", "sinusoidal", "learned") if model_class in tiny.BACKBONES else ("rotary",):
        model = tiny.model(model_class, position_embedding_type=positions)
        model.save_pretrained(tmp_path / "full")
        half = model_class.from_pretrained(tmp_path / "full", dtype=dtype)
        assert {p.dtype for p in half.parameters()} == {half.dtype} == {dtype}
        got = outputs(half, output_hidden_states=True)
        for name, value in outputs(model).items():
            assert got[name].dtype == dtype
            torch.testing.assert_close(got[name].float(), value, atol=0.15, rtol=0.05)
        half.save_pretrained(tmp_path / "half")
        again = model_class.from_pretrained(tmp_path / "half")  # the file says so itself
        assert again.dtype == dtype
        assert_same(again, half)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("model_class", tiny.MODELS, ids=names)
def test_a_model_made_on_the_meta_device_has_all_it_needs_in_its_checkpoint(
    model_class: type[PreTrainedModel], positions: str
) -> None:
    model = tiny.model(model_class, position_embedding_type=positions)
    with torch.device("meta"):
        empty = model_class(copy.deepcopy(model.config))
    assert {p.device.type for p in [*empty.parameters(), *empty.buffers()]} == {"meta"}
    empty.load_state_dict(model.state_dict(), assign=True)
    empty.tie_weights()
    assert_same(empty, model)


@pytest.mark.parametrize(
    "options", [{"device_map": "cpu"}, {"device_map": "auto"}, {"low_cpu_mem_usage": True}], ids=str
)
@pytest.mark.parametrize("model_class", tiny.MODELS, ids=names)
def test_loading_onto_devices(model_class: type[PreTrainedModel], options: dict[str, Any], tmp_path: Path) -> None:
    model = tiny.model(model_class, position_embedding_type="sinusoidal")
    model.save_pretrained(tmp_path)
    opened = model_class.from_pretrained(tmp_path, **options)
    assert_same(opened, model)
    if opened.get_output_embeddings() is not None:
        assert opened.get_output_embeddings().weight is opened.get_input_embeddings().weight


@pytest.mark.parametrize("shard_size", ["10GB", "20KB"])
@pytest.mark.parametrize("model_class", tiny.MODELS, ids=names)
def test_a_saved_folder_is_safetensors_json_and_the_files_of_its_family(
    model_class: type[PreTrainedModel], shard_size: str, tmp_path: Path
) -> None:
    model = tiny.model(model_class, position_embedding_type="learned")
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    files = {path.name for path in tmp_path.iterdir()}
    weights = {name for name in files if name.endswith(".safetensors")}
    assert {name for name in files if name.endswith(".py")} == shipped(model_class)
    rest = files - weights - shipped(model_class)
    assert rest <= {"config.json", "generation_config.json", "model.safetensors.index.json"} and "config.json" in rest
    assert ("generation_config.json" in rest) == model.can_generate()
    assert (len(weights) > 1) == ("model.safetensors.index.json" in rest) == (shard_size == "20KB")

    stored = {name: tensor for file in weights for name, tensor in load_file(tmp_path / file).items()}
    parameters = dict(model.named_parameters())  # what is tied, once
    assert stored.keys() == parameters.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in parameters.items())
    assert_same(model_class.from_pretrained(tmp_path), model)


# Configurations


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_configuration_survives_the_trip(family: str, tmp_path: Path) -> None:
    config = tiny.config(
        family,
        head_dim=6,
        value_head_dim=10,
        rope_parameters={"rope_theta": 500.0, "rope_type": "default"},
        classifier_dropout=0.3,
        id2label={0: "no", 1: "yes", 2: "perhaps"},
    )
    config.save_pretrained(tmp_path)
    opened = AutoConfig.from_pretrained(tmp_path)
    assert opened.to_diff_dict() == config.to_diff_dict()
    assert (opened.rope_parameters["rope_theta"], opened.value_head_dim, opened.num_labels) == (500.0, 10, 3)
    assert AutoConfig.from_pretrained(tmp_path, dropout=0.25).dropout == 0.25
    assert AutoModel.from_config(opened).config.head_dim == 6


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_notes_of_other_programs_stay_and_near_misses_are_refused(family: str, tmp_path: Path) -> None:
    tiny.config(family).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    saved = json.loads(path.read_text())

    path.write_text(json.dumps(saved | {"serving_notes": {"replicas": 3}, "_our_run": "a7"}))
    opened = AutoConfig.from_pretrained(tmp_path)
    assert opened.serving_notes == {"replicas": 3}
    opened.save_pretrained(tmp_path)
    again = json.loads(path.read_text())
    assert again["serving_notes"] == {"replicas": 3} and again["_our_run"] == "a7"

    path.write_text(json.dumps(saved | {"hiden_size": 64}))
    with pytest.raises(ValueError, match="hiden_size=64.*did you mean 'hidden_size'"):
        AutoConfig.from_pretrained(tmp_path)
    path.write_text(json.dumps(saved | {"hidden_act": "swish"}))
    with pytest.raises(
        ValueError, match="hidden_act='swish' must be one of 'swiglu', 'relu', 'gelu', 'silu', 'gelu_new', '"
    ):
        AutoConfig.from_pretrained(tmp_path)

    for key in ("numb_attention_heads", "serving_notes"):
        with pytest.raises(ValueError, match=f"{key}=3 is not a field"):
            tiny.config(family, **{key: 3})
    AutoModel.from_config(tiny.config(family)).save_pretrained(tmp_path)
    with pytest.raises((ValueError, TypeError), match="droput"):
        AutoModel.from_pretrained(tmp_path, droput=0.3)


# The files that travel


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_files_need_nothing_but_torch_and_transformers(name: str) -> None:
    """A third-party import is asked for by whoever loads them, even where it would never run; only flat siblings by
    `from .name import` are copied along."""
    allowed = {"torch", "transformers", "huggingface_hub", *sys.stdlib_module_names}
    source = (PACKAGE / name).read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(source)))
    absolute = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imports_from = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    absolute += [node.module for node in imports_from if not node.level]
    assert {module.partition(".")[0] for module in absolute} <= allowed
    for node in imports_from:
        if node.level:
            assert node.level == 1 and f"{node.module}.py" in SHIPPED and all(a.name != "*" for a in node.names)
    assert not FAMILY_FILES or not {f"{node.module}.py" for node in imports_from if node.level} & set(FAMILY_FILES)
