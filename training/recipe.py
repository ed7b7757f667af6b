"""Recipes: everything that decides what a run computes, and what cannot go together.

All problems are reported in a single `RecipeError`, so that a recipe with three mistakes needs one run to mend.
"""

import contextlib
import dataclasses
import importlib.util
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from huggingface_hub.errors import StrictDataclassFieldValidationError
from huggingface_hub.utils import validate_repo_id
from pydantic import AfterValidator, Field
from pydantic_core import to_jsonable_python
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_scratch_transformer.configuration_scratch import CHOICES, ScratchConfig
from hf_scratch_transformer.files import possible_path
from hf_scratch_transformer.tokenization import LARGEST_VOCABULARY

from . import sections
from .base_model import PATH, base_config, build_config
from .sections import RecipeError, Section, filled, names, nearest, override, read_yaml, reason, shown, validated

Names = tuple[str, ...]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
PathText = Annotated[str, AfterValidator(possible_path), AfterValidator(os.path.expanduser)]


def _repository_id(text: str) -> str:
    validate_repo_id(text)
    return text


RepositoryId = Annotated[str, AfterValidator(_repository_id)]


class Source(Section):
    """One of several corpora that are trained on at once; `data` says how its rows are read."""

    path: PathText | None = Field(None, description="a Hub dataset id, a folder or a file; null: that of data")
    name: str | None = Field(None, description="configuration of the Hub dataset")
    revision: str | None = Field(None, description="of the Hub dataset: a branch, tag or commit")
    split: Names = Field(("train",), min_length=1, description="names to look for, as those of `data.splits`")
    columns: dict[str, Names] = Field({}, description="where they have other names than those of data")
    weight: float = Field(1.0, gt=0, description="share of the tokens, relative to the other sources")


class Data(Section):
    """Where the corpus lies and how it becomes batches."""

    path: PathText = Field(examples=["runs/grammar"], description="a Hub dataset id, a folder or a file")
    name: str | None = Field(None, description="configuration of the Hub dataset")
    revision: str | None = Field(None, description="of the Hub dataset: a branch, tag or commit")
    splits: dict[str, Names] = Field(
        {"train": ("train",)},
        description="train, validation, test: names to look for, the first that exists counts: a Hub split, a file, "
        "the common stem of parallel text files (`train` finds train.en and train.de) or of numbered shards, a pattern "
        "(`shards/*.jsonl.gz`), a folder; `name[:90%]` takes a part",
    )
    sources: tuple[Source, ...] = Field(
        (),
        description="what is trained on, in the place of splits.train: sections with path, name and revision (else "
        "those of data), split, columns where they have other names (source and target changed about: both directions "
        "in one model), and weight, the share of the tokens that it gives, be it seen less than once or many times",
    )
    columns: dict[str, Names] = Field(
        {},
        description="source and target for translation, else text, which is the default: names of the column to look "
        "for, the first that exists counts",
    )
    sample_by: Literal["line", "paragraph", "document"] = Field("line", description="what a row of plain text is")
    cache: PathText | None = Field(
        None, description="folder that keeps the tokens of training splits; null: scratch_transformer in HF_HOME"
    )
    streaming: bool = Field(False, description="read the training split part by part, not into memory at once")
    part_rows: int = Field(100_000, ge=1, description="rows of a streamed part")
    malformed: Literal["skip", "refuse"] = Field("skip", description="what happens to rows that cannot be used")
    deduplicate: bool = Field(False, description="leave out rows of the training split that are there already")
    max_length: int = Field(256, ge=2, description="tokens of one side of a pair; longer rows are malformed")
    window: int = Field(256, ge=2, description="predictions per window of a language model")
    separate_documents: bool = Field(False, description="no attention between documents that share a window")
    random_windows: bool = Field(False, description="windows at random offsets, not a partition of the corpus")
    batch_tokens: int = Field(4096, ge=2, description="padded tokens of one batch, over all processes")
    workers: int = Field(0, ge=0, description="loader processes")
    languages: Names = Field((), description="ISO 639 codes of the texts, for the model card; or code, multilingual")


class Tokenizer(Section):
    """The vocabulary: trained on the training split, or loaded from a folder or the Hub."""

    path: PathText | None = Field(
        None, description="a folder or Hub id; null: that of model.path, or else one is trained"
    )
    algorithm: Literal["byte_bpe", "wordpiece", "char"] | None = Field(None, description="null: what suits the family")
    vocab_size: int = Field(
        8000, ge=2, lt=LARGEST_VOCABULARY, description="most tokens in all; a small corpus gives fewer"
    )
    min_frequency: int = Field(2, ge=1, description="how often a token has to occur")
    lowercase: bool = Field(False, description="make no difference between capitals and small letters")
    add_prefix_space: bool = Field(
        False, description="of byte_bpe: the first word of a text is the token that it is elsewhere, behind a space"
    )
    separate_vocabs: bool = Field(
        False,
        description="of a translator: a vocabulary for each side, each trained on its column, no shared embeddings",
    )


class Optimisation(Section):
    """The update rule, its schedule, and when training ends."""

    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="muon: Muon on the matrices, AdamW on everything else"
    )
    learning_rate: float = Field(1e-3, gt=0, description="of AdamW")
    matrix_learning_rate: float = Field(0.02, gt=0, description="of Muon")
    betas: tuple[Momentum, Momentum] = Field((0.9, 0.95), description="of AdamW")
    momentum: float = Field(0.95, ge=0, lt=1, description="of Muon")
    weight_decay: float = Field(0.0, ge=0, description="on matrices only")
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "warmup_stable_decay", "plateau"] = Field(
        "linear", description="of the learning rate, after the warmup"
    )
    warmup_steps: int = Field(100, ge=0, description="steps in which the learning rate rises from zero")
    final_fraction: float = Field(0.0, ge=0, lt=1, description="of the learning rate, at the end of a decay")
    decay_fraction: Fraction = Field(0.2, description="of the run, in which warmup_stable_decay decays")
    plateau_factor: Fraction = Field(0.9, description="by which plateau multiplies the learning rate")
    plateau_patience: int = Field(10, ge=1, description="evaluations without progress before plateau does so")
    max_steps: int = Field(examples=[1000], ge=1, description="steps of the run, which the schedule follows")
    max_minutes: float | None = Field(
        None,
        gt=0,
        description="wall clock after which a run that is slower than thought ends early, its schedule cut off",
    )
    accumulation: int = Field(1, ge=1, description="batches per step")
    clip_norm: float = Field(1.0, ge=0, description="largest norm of the gradient; 0: no clipping")
    max_skipped_steps: int = Field(
        3, ge=0, description="in a row whose gradients are not finite, and which are left out, before the run ends"
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of the target spread over the vocabulary")
    r_drop: float = Field(0.0, ge=0, description="weight of the divergence between two dropout masks")
    mask_fraction: tuple[Fraction, ...] = Field(
        (0.15,),
        min_length=1,
        max_length=2,
        description="of the tokens of a masked LM: constant, or first and last value of a linear schedule",
    )
    whole_word_masking: bool = Field(False, description="mask all pieces of a word together")
    final_weights: Literal["last", "best", "ema", "mean"] = Field(
        "last",
        description="what is tested in the end and becomes the model: the weights of the last step or of the best "
        "evaluation, their exponential moving average, or the mean of the last checkpoints",
    )
    ema_decay: Fraction = Field(0.999, description="of the exponential moving average, per step")
    mean_of: int = Field(5, ge=2, description="checkpoints in the mean")
    precision: Literal["fp32", "tf32", "bf16", "auto"] = Field(
        "fp32",
        description="fp32: nothing is rounded; tf32: products of matrices in a GPU's TF32 units, on a CPU as fp32; "
        "bf16: autocast; auto: bf16 where the hardware multiplies it, else fp32",
    )
    compile: bool = Field(False, description="torch.compile")
    gradient_checkpointing: bool = Field(
        False, description="layers are computed again in the backward pass: less memory, about a third more time"
    )


class Evaluation(Section):
    """What is measured while training and at its end."""

    every_steps: int | None = Field(None, ge=1, description="steps between evaluations")
    every_minutes: float | None = Field(None, gt=0, description="minutes between evaluations")
    stride: int | None = Field(
        None,
        ge=1,
        description="tokens from one evaluation window of a causal LM to the next, null: the window, no overlap; each "
        "token counts once, all but the first window's see at least `data.window - stride` tokens before them, for as "
        "many times the work as strides fit into the window",
    )
    generate_rows: int = Field(200, ge=0, description="validation rows translated at each evaluation; 0: loss only")
    samples: int = Field(3, ge=0, description="outputs shown at each evaluation")
    num_beams: int = Field(1, ge=1, description="at the final test; evaluations on the way decode greedily")
    length_penalty: float = Field(1.0, description="exponent of the length that beam search divides scores by")
    minimum_bayes_risk: int | None = Field(
        None,
        ge=2,
        description="at the final test: of so many translations, the better half of twice as many beams, that which is "
        "most like all of them by BLEU (Kumar & Byrne 2004); the model is saved with `num_beams` all the same",
    )
    group_by: Names = Field((), description="columns of the test rows by whose values scores are also given apart")
    best_metric: str = Field("loss", description="loss (lower is better) or a score (higher is better)")
    early_stopping: int | None = Field(None, ge=1, description="evaluations without progress before the run ends")


class Checkpoints(Section):
    """How often the run is saved and what is kept."""

    every_steps: int | None = Field(None, ge=1, description="steps between checkpoints")
    every_minutes: float | None = Field(None, gt=0, description="minutes between checkpoints")
    keep_last: int = Field(2, ge=1, description="newest checkpoints kept")
    keep_best: int = Field(1, ge=0, description="checkpoints kept for their evaluation")
    background: bool = Field(True, description="written while training goes on, from a copy in main memory")


class Recipe(Section):
    """Everything that decides what a run computes, and where it writes."""

    objective: Literal["translation", "causal_lm", "masked_lm"] = Field(
        examples=["translation"], description="what is predicted"
    )
    model: dict[str, Any] = Field(
        examples=[{"model_type": "scratch_seq2seq"}],
        description="model_type and the fields of its configuration: --model.hidden_size 256; or path, a folder or Hub "
        "id of a saved model to go on from, ours or native, and the fields to change",
    )
    data: Data = Field(examples=[{"path": "runs/grammar"}])
    tokenizer: Tokenizer = Tokenizer()
    optimisation: Optimisation = Field(examples=[{"max_steps": "1000"}])
    evaluation: Evaluation = Evaluation()
    checkpoints: Checkpoints = Checkpoints()
    seed: int = Field(1, ge=0, lt=2**32, description="of everything that is drawn at random")
    output_dir: PathText = Field("", min_length=1, description="the run's folder; by default runs/<name of the recipe>")
    log_every: int = Field(10, ge=1, description="steps between lines of the log")
    trackers: tuple[Literal["tensorboard", "trackio"], ...] = Field((), description="where the log is shown as well")
    resume: bool = Field(False, description="continue from the newest complete checkpoint of output_dir")
    force: bool = Field(False, description="resume although the recipe, vocabulary or corpus has changed")
    overwrite: bool = Field(False, description="replace the run that output_dir holds")
    push_to_hub: RepositoryId | None = Field(None, description="repository that receives the finished model folder")
    license: str | None = Field(
        None, min_length=1, description="of the weights, as the Hub names it, for the model card; null: none is claimed"
    )
    model_card: PathText | None = Field(
        None, description="folder that receives the card, its picture and the run's records, without weights"
    )

    def build_config(self, **fields: Any) -> PreTrainedConfig:
        """The model's configuration; `fields` (vocabulary size, special tokens) fill in what the recipe leaves open."""
        return build_config(self.model, fields)

    def identity(self) -> dict[str, Any]:
        """The part of the recipe that a resumed run must share: everything but places, retention and reporting."""
        reporting = {"output_dir", "trackers", "push_to_hub", "license", "model_card", "checkpoints"}
        by_content = {"path", "splits", "workers", "languages", "cache"}  # what is read is compared by its content
        data: Any = dict.fromkeys(by_content, True)
        data["sources"] = {"__all__": {"path", "name", "revision", "split"}}
        excluded: Any = dict.fromkeys(reporting | ORDERS, True) | {"data": data, "model": {PATH}}
        return self.model_dump(mode="json", exclude=excluded)


def default(name: str) -> Any:
    """Of the field of a recipe by its dotted name, as JSON has it; None for what has none."""
    kind: Any = Recipe
    *sections, field = name.split(".")
    for section in sections:
        kind = getattr(kind.model_fields.get(section), "annotation", None)
        if not hasattr(kind, "model_fields"):
            return None
    known = kind.model_fields.get(field)
    if known is None or known.is_required():
        return None
    return to_jsonable_python(known.get_default(call_default_factory=True))


def changes(old: Any, new: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """The dotted names of what is no longer the same in two records of a run, each with a line that says so; a field of
    its `recipe` that an older version has not written down was as it is by default."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            name = f"{where}.{key}" if where else key
            is_new = key not in old and name.startswith("recipe.")
            was = default(name.removeprefix("recipe.")) if is_new else old.get(key)
            yield from changes(was, new.get(key), name)
    elif old != new:
        are_digests = all(re.fullmatch("[0-9a-f]{64}", str(each)) for each in (old, new))
        what = "is another" if are_digests else f"was {old}, now {new}"
        yield where, f"{where.removeprefix('recipe.')} {what}"


ORDERS = {"resume", "force", "overwrite"}  # to one process, not properties of the run
# What a resumed run may have otherwise: when it ends, how often it is measured and what it shows.
ADJUSTABLE = {
    *("optimisation.max_steps", "optimisation.max_minutes", "optimisation.max_skipped_steps"),
    "optimisation.gradient_checkpointing",
    *("evaluation.every_steps", "evaluation.every_minutes", "evaluation.early_stopping"),
    *("evaluation.samples", "log_every"),
}
RECIPES = Path(__file__).parent / "recipes"
OURS = ("scratch_encoder", "scratch_decoder", "scratch_seq2seq")
COLUMNS = {"translation": ("source", "target"), "causal_lm": ("text",), "masked_lm": ("text",)}
OF_ONE_OBJECTIVE = {
    **dict.fromkeys(("evaluation.minimum_bayes_risk", "evaluation.group_by", "optimisation.r_drop"), "translation"),
    "evaluation.stride": "causal_lm",
}
# What evaluations measure beside the loss and its perplexity.
SCORES = {
    "translation": ("bleu", "bleu_lowercase", "chrf", "exact_match"),
    "causal_lm": ("bits_per_byte", "word_perplexity"),
    "masked_lm": ("masked_accuracy",),
}
# What fields are called elsewhere.
SYNONYMS = {
    "batch_size": "data.batch_tokens",
    "block_size": "data.window",
    "d_ff": "model.intermediate_size",
    "d_model": "model.hidden_size",
    "dataset": "data.path",
    "epochs": "optimisation.max_steps",
    "eval_steps": "evaluation.every_steps",
    "grad_clip": "optimisation.clip_norm",
    "gradient_accumulation_steps": "optimisation.accumulation",
    "logging_steps": "log_every",
    "lr": "optimisation.learning_rate",
    "lr_scheduler_type": "optimisation.schedule",
    "max_grad_norm": "optimisation.clip_norm",
    "max_seq_length": "data.window",
    "mixed_precision": "optimisation.precision",
    "n_embd": "model.hidden_size",
    "n_head": "model.num_attention_heads",
    "n_layer": "model.num_hidden_layers",
    "num_heads": "model.num_attention_heads",
    "num_layers": "model.num_hidden_layers",
    "num_train_epochs": "optimisation.max_steps",
    "num_workers": "data.workers",
    "per_device_train_batch_size": "data.batch_tokens",
    "report_to": "trackers",
    "save_steps": "checkpoints.every_steps",
    "save_total_limit": "checkpoints.keep_last",
    "seq_len": "data.window",
}


def parse(argv: Sequence[str]) -> Recipe:
    """Read `RECIPE.yaml [--key value | --key=value | --flag] ...`; keys are dotted (`--model.hidden_size 256`).

    Raises RecipeError, with every problem found in one message.
    """
    if not argv or argv[0].startswith("-"):
        usage = f"usage: accelerate launch -m {__package__} RECIPE.yaml [--key value ...]; --help lists the keys"
        raise RecipeError(usage)
    path = recipe_path(argv[0])
    tree, problems = read_yaml(path)
    tree.setdefault("output_dir", f"runs/{path.stem}")
    return resolved(str(path), tree, argv[1:], problems)


def recipe_path(name: str) -> Path:
    """The file of that name, or else of the recipe of that name that comes with this program."""
    known = RECIPES / f"{name}.yaml"
    return known if known.is_file() and not os.path.lexists(name) else Path(name)


def shipped() -> list[str]:
    """The names of the recipes that come with this program, and are recipes of this kind."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml") if "objective" in read_yaml(path)[0])


def resolved(source: str, tree: dict[str, Any], words: Sequence[str], problems: Iterable[str] = ()) -> Recipe:
    """The recipe in a tree of entries, overridden by the words of a command line.

    Raises RecipeError, with the `problems` there are already and every other one, by the name of the source.
    """
    problems = [*problems, *override(tree, words, Recipe)]
    if isinstance(data := tree.get("data"), dict):
        if tree.get("objective") in ("causal_lm", "masked_lm"):
            data.setdefault("columns", {"text": "text"})  # which is what readers of plain text call it
        if data.get("sources"):
            data.setdefault("splits", {})
    recipe, mistakes = validated(Recipe, tree, partial(_hint, tree.get("model")))
    problems += mistakes
    for rule in RULES:
        with contextlib.suppress(AttributeError):  # what the rule asks for is wrong, which has been said
            problems += rule(recipe)
    if problems:
        raise RecipeError(f"{source}: {len(problems)} problem(s)\n" + "\n".join(f"  {problem}" for problem in problems))
    return recipe


def reference(width: int) -> str:
    """All fields of a recipe and of our models' configurations, in lines of `width` characters."""
    return f"{sections.reference(Recipe, width)}\n\n{filled(_model_reference(), width)}"


def _model_reference() -> Iterator[str]:
    """The fields of the section `model`, which mean what the comments say that stand beside or above them."""
    yield "model: Fields of all our configurations. With another model_type those of its own configuration hold."
    field = re.compile(r"(?P<above>(?:^    # .*\n)*)^    (?P<name>\w+): [^=\n]+ = .*?(?:  # (?P<beside>.*))?$", re.M)
    for model_type in (None, *OURS):
        kind = CONFIG_MAPPING[model_type] if model_type else ScratchConfig
        types = {each.name: each for each in dataclasses.fields(kind)}
        if model_type:
            yield from ("", f"model, where model_type is {model_type}: {kind.__doc__}")
        above = kind.__mro__[::-1]  # what the first paragraph has is not said again
        parts = above[above.index(ScratchConfig) + 1 :] if model_type else [kind]
        for found in field.finditer("".join(map(inspect.getsource, parts))):
            meaning = found["beside"] or " ".join(re.findall(r"# (.*)", found["above"]))
            if meaning and found["name"] in types:
                name = found["name"]
                kinds = getattr(types[name].type, "__name__", str(types[name].type))
                wanted = f"one of {', '.join(CHOICES[name])}" if name in CHOICES else kinds
                yield from (
                    f"  --model.{name}",
                    f"      {wanted}; default {shown(types[name].default)}",
                    f"      {meaning}",
                )


def dump(recipe: Recipe) -> str:
    """The resolved recipe as YAML that `parse` reads back to an equal one."""
    return yaml.safe_dump(recipe.model_dump(mode="json", exclude=ORDERS), sort_keys=False, allow_unicode=True)


# --- Contradictions -------------------------------------------------------------------------------------------------
# Values that are fine alone and impossible together. Each rule yields what is wrong, and reads nothing that it does not
# need: one whose field is wrong already is passed over, the others are not.

RULES: list[Callable[[Recipe], Iterable[str]]] = []


def _rule(rule: Callable[[Recipe], Iterable[str]]) -> Callable[[Recipe], Iterable[str]]:
    RULES.append(rule)
    return rule


@_rule
def _columns(recipe: Recipe) -> Iterator[str]:
    wanted = COLUMNS[recipe.objective]
    if set(recipe.data.columns) != set(wanted):
        given = ", ".join(recipe.data.columns) or "none"
        yield f"data.columns: {recipe.objective} needs exactly {', '.join(wanted)}, got {given}"
    for number, source in enumerate(recipe.data.sources):
        for name in sorted(source.columns.keys() - set(wanted)):
            yield f"data.sources.{number}.columns.{name}: {recipe.objective} has {', '.join(wanted)}"
        for name in ("name", "revision"):
            if source.path is None and getattr(source, name) is not None:
                yield f"data.sources.{number}.{name}: {shown(getattr(source, name))} is of no path; name that too"


@_rule
def _roles(recipe: Recipe) -> Iterator[str]:
    roles = ("train", "validation", "test")
    for role in sorted(recipe.data.splits.keys() - set(roles)):
        yield f"data.splits.{role}: must be one of {', '.join(roles)}{nearest(role, roles)}"
    if "train" not in recipe.data.splits and not recipe.data.sources:
        yield "data.splits.train: missing"
    elif "train" in recipe.data.splits and recipe.data.sources:
        yield "data.splits.train: data.sources are what is trained on, so leave one of the two out"


@_rule
def _streamed(recipe: Recipe) -> Iterator[str]:
    """What takes the whole of a split."""
    for name in ("sources", "deduplicate"):
        if recipe.data.streaming and getattr(recipe.data, name):
            yield f"data.{name}: not with data.streaming, which reads a part at a time"


@_rule
def _languages(recipe: Recipe) -> Iterator[str]:
    for language in recipe.data.languages:
        if language not in ("code", "multilingual") and not re.fullmatch("[a-z]{2,3}", language):
            yield f"data.languages: {shown(language)} is not an ISO 639 code of two or three small letters, such as en"


def scores(objective: str) -> tuple[str, ...]:
    """The names of what evaluations measure."""
    return ("loss", "perplexity", *SCORES[objective])


def _evaluates(recipe: Recipe) -> bool:
    return recipe.evaluation.every_steps is not None or recipe.evaluation.every_minutes is not None


@_rule
def _validation(recipe: Recipe) -> Iterator[str]:
    if _evaluates(recipe) and "validation" not in recipe.data.splits:
        yield "evaluation: evaluating while training needs data.splits.validation"


@_rule
def _best_metric(recipe: Recipe) -> Iterator[str]:
    given, known = recipe.evaluation.best_metric, scores(recipe.objective)
    if given in SCORES[recipe.objective] and recipe.objective == "translation" and not recipe.evaluation.generate_rows:
        yield f"evaluation.best_metric: {given} is not measured with evaluation.generate_rows 0"
    elif given not in known:
        yield f"evaluation.best_metric: must be one of {', '.join(known)}, got {shown(given)}{nearest(given, known)}"


@_rule
def _other_objectives(recipe: Recipe) -> Iterator[str]:
    for name, objective in OF_ONE_OBJECTIVE.items():
        if recipe.objective != objective and attrgetter(name)(recipe):
            yield f"{name}: an option of {objective}, not of {recipe.objective}"


@_rule
def _group_by(recipe: Recipe) -> Iterator[str]:
    if recipe.objective == "translation" and recipe.evaluation.group_by and "test" not in recipe.data.splits:
        yield "evaluation.group_by: groups of test rows need data.splits.test"


@_rule
def _longest_row(recipe: Recipe) -> Iterator[str]:
    longest = recipe.data.max_length if recipe.objective == "translation" else recipe.data.window + 1
    if recipe.data.batch_tokens < longest:
        yield f"data.batch_tokens: {recipe.data.batch_tokens} cannot hold one row of {longest} tokens"


@_rule
def _positions(recipe: Recipe) -> Iterator[str]:
    name = "max_length" if recipe.objective == "translation" else "window"
    with contextlib.suppress(Exception):  # of the configuration, which has a rule of its own
        limit = getattr(recipe.build_config(), "max_position_embeddings", None)
        if limit is not None and (longest := getattr(recipe.data, name)) > limit:
            yield f"data.{name}: {longest} must be at most model.max_position_embeddings {limit}"


@_rule
def _stride(recipe: Recipe) -> Iterator[str]:
    stride = recipe.evaluation.stride
    if recipe.objective == "causal_lm" and stride is not None and stride > recipe.data.window:
        yield f"evaluation.stride: {stride} must be at most data.window {recipe.data.window}"


@_rule
def _mean(recipe: Recipe) -> Iterator[str]:
    kept, wanted = recipe.checkpoints.keep_last, recipe.optimisation.mean_of
    if recipe.optimisation.final_weights == "mean" and kept < wanted:
        yield f"checkpoints.keep_last: {kept} is too few, the mean of {wanted} checkpoints needs as many kept"


@_rule
def _best(recipe: Recipe) -> Iterator[str]:
    if recipe.optimisation.final_weights == "best" and not (recipe.checkpoints.keep_best and _evaluates(recipe)):
        yield "optimisation.final_weights: best needs evaluations while training and checkpoints.keep_best"


@_rule
def _installed(recipe: Recipe) -> Iterator[str]:
    for tracker in recipe.trackers:
        if importlib.util.find_spec(tracker) is None:
            yield f"trackers: {tracker} is not installed"


@_rule
def _model_type(recipe: Recipe) -> Iterator[str]:
    model_type, path = recipe.model.get("model_type"), recipe.model.get(PATH)
    if PATH in recipe.model and not isinstance(path, str):
        yield f"model.{PATH}: must be a folder or an id on the Hub, got {shown(path)}"
    elif isinstance(path, str):
        try:
            base_config(path)
        except ValueError as error:
            yield f"model.{PATH}: {reason(error)}"
    elif not _config_fields(recipe.model):
        given = "missing" if model_type is None else f"{shown(model_type)} is unknown"
        near = nearest(str(model_type), CONFIG_MAPPING)
        yield f"model.model_type: {given}, must be one of transformers' or {', '.join(OURS)}{near}"


@_rule
def _card(recipe: Recipe) -> Iterator[str]:
    if recipe.model.get("model_type", OURS[0]) not in OURS:
        for name in ("push_to_hub", "model_card"):
            if getattr(recipe, name) is not None:
                given = recipe.model["model_type"]
                yield f"{name}: only models of ours have a card, which a push needs: {', '.join(OURS)}, not {given}"


@_rule
def _model(recipe: Recipe) -> Iterator[str]:
    if not (known := _config_fields(recipe.model)):
        return
    # Native configurations swallow misspelt keys in silence.
    for key in sorted(recipe.model.keys() - known.keys()):
        what = recipe.model.get("model_type", recipe.model.get(PATH))
        yield f"model.{key}: {what} has no such field{_hint(recipe.model, f'model.{key}')}"
    fields = {key: value for key, value in recipe.model.items() if key in known}
    tokenizer = getattr(recipe, "tokenizer", Tokenizer())
    defaults = {"vocab_size": getattr(tokenizer, "vocab_size", Tokenizer().vocab_size)}
    if getattr(tokenizer, "separate_vocabs", False):
        if "decoder_vocab_size" not in known:
            what = recipe.model.get("model_type", recipe.model.get(PATH))
            yield f"tokenizer.separate_vocabs: {what} has one vocabulary; those of scratch_seq2seq may be two"
            return
        if fields.get("share_encoder_decoder_embeddings"):
            yield "model.share_encoder_decoder_embeddings: must be false with tokenizer.separate_vocabs, got true"
            return
        defaults |= {"decoder_vocab_size": defaults["vocab_size"], "share_encoder_decoder_embeddings": False}
    while True:
        try:
            config = build_config(fields, defaults)
        except Exception as error:  # whatever a configuration class raises is a problem of the recipe
            name = str(error).split("'")[1] if isinstance(error, StrictDataclassFieldValidationError) else None
            if name in fields:  # the first field of another type, behind which there may be more
                yield f"model.{name}: must be {known[name]}, got {shown(fields.pop(name))}"
                continue
            yield f"model{_blamed(fields, defaults, error)}: {reason(error)}"
            return
        rope = getattr(config, "rope_parameters", None) or {}
        try:  # which a model does at its first step
            ROPE_INIT_FUNCTIONS.get(rope.get("rope_type"), lambda *_, **__: None)(config, "cpu", seq_len=1)
        except Exception as error:
            yield f"model.rope_parameters: {shown(rope)} gives no frequencies: {reason(error)}"
        if not config.return_dict:
            yield "model.return_dict: must be true, since training reads outputs by name, got false"
        return


def _blamed(fields: dict[str, Any], defaults: dict[str, Any], error: Exception) -> str:
    """The field without which a configuration can be built, as `.name`, where an error says nothing of fields."""
    for name in () if any(name in str(error) for name in fields) else fields:
        with contextlib.suppress(Exception):
            build_config({other: value for other, value in fields.items() if other != name}, defaults)
            return f".{name}: {shown(fields[name])}"
    return ""


def _hint(model: Any, key: str) -> str:
    """What an unknown key of a recipe with such a section `model` may have meant."""
    known, word = [*names(Recipe), *(f"model.{name}" for name in _config_fields(model))], key.rpartition(".")[2]
    return f"; did you mean {SYNONYMS[word]}?" if SYNONYMS.get(word) in known else nearest(key, known)


def _config_fields(model: Any) -> dict[str, str]:
    """What the section `model` may hold, with its type in Python; empty when there is no such kind of model."""
    model_type, path = (model.get(name) if isinstance(model, dict) else None for name in ("model_type", PATH))
    if isinstance(path, str):
        with contextlib.suppress(ValueError):
            return _fields_of(type(base_config(path))) | {PATH: "str"}
    elif isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        return _fields_of(CONFIG_MAPPING[model_type])
    return {}


def _fields_of(kind: type[PreTrainedConfig]) -> dict[str, str]:
    types = {field.name: getattr(field.type, "__name__", str(field.type)) for field in dataclasses.fields(kind)}
    return types | {alias: types.get(name, "") for alias, name in kind.attribute_map.items()} | {"model_type": "str"}
