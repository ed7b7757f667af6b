"""Two models beside each other, on the same tokens: what they compute, and what they write."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

# Of the largest number computed, in single precision: of two orders of the same sums some 1e-6 remain after a few
# layers, 1e-4 after many; a matrix in the wrong place leaves nothing alike. Half-precision products round each factor.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
ROWS, LENGTH = 2, 32
PROMPT, NEW = 8, 20  # tokens of a prompt, and at most those that are written after each
OUTPUTS = ("logits", "start_logits", "end_logits", "last_hidden_state", "pooler_output")

# Given the source of a translator (B, S), what is there of a text (B, T), and a number N: so many tokens more (B, N),
# greedily, and the logits (B, N, V) that they were taken from.
Writer = Callable[[Tensor | None, Tensor, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Comparison:
    """How far apart two models are."""

    output: str  # the one that is furthest apart
    difference: float  # the largest
    reach: float  # the largest number in it
    tolerance: float = TOLERANCES[torch.float32]
    tokens: tuple[int, int] | None = None  # of those written greedily, how many are the same, and of how many

    @property
    def allowed(self) -> float:
        return self.tolerance * max(1.0, self.reach)

    @property
    def is_close(self) -> bool:
        return self.difference <= self.allowed

    @property
    def subject(self) -> str:
        """What was compared."""
        written = "; {} of {} greedy tokens are the same".format(*self.tokens) if self.tokens else ""
        return f"{self.output} reach {self.reach:.3g}{written}"

    def __str__(self) -> str:
        output, _, written = self.subject.partition(";")
        apart = f"differ by at most {self.difference:.2g} ({self.allowed:.2g} allowed)"
        return f"the same random tokens through both: {output}, {apart}{written and ';'}{written}"


@torch.no_grad()
def compare(one: PreTrainedModel, other: PreTrainedModel) -> Comparison:
    """What two models of the same task compute of the same random tokens, none of them padding; and what the second
    writes, if it is a language model."""
    inputs = tokens_for(one)
    before, after = (model.eval()(**inputs) for model in (one, other))
    names = [name for name in OUTPUTS if before.get(name) is not None and after.get(name) is not None]
    computed = furthest((name, before[name], after[name]) for name in names)
    return worse(computed, follow(one, by_model(other))) if one.can_generate() and other.can_generate() else computed


def furthest(outputs: Iterable[tuple[str, Tensor, Tensor]], dtype: torch.dtype = torch.float32) -> Comparison:
    """Of outputs with their names, expected and actual, those that are furthest apart. `dtype`: of the products that
    the actual ones are of."""
    found = []
    for name, expected, actual in outputs:
        expected, actual = expected.float(), actual.float()
        difference = (actual - expected).abs().max().nan_to_num(nan=float("inf")).item()
        found.append(Comparison(name, difference, expected.abs().max().item(), TOLERANCES[dtype]))
    return max(found, key=lambda each: each.difference / each.allowed)


def worse(*comparisons: Comparison) -> Comparison:
    """That of which the models are further apart, with the tokens of that which has some."""
    worst = max(comparisons, key=lambda each: each.difference / each.allowed)
    return dataclasses.replace(worst, tokens=next((each.tokens for each in comparisons if each.tokens), None))


@torch.no_grad()
def follow(
    model: PreTrainedModel,
    write: Writer,
    dtype: torch.dtype = torch.float32,
    words: int | None = None,
    barred: Sequence[int] = (),
) -> Comparison:
    """What an engine writes greedily after random tokens, beside the logits that a model has there.

    A token that the model would not have written counts by how much less likely it makes it: where two are equal up to
    rounding, either will do.

    Args:
        model: that the engine is to be like, in evaluation mode.
        write: the engine.
        dtype: of its products.
        words: the tokens that it knows; default: all.
        barred: those that it does not write.
    """
    config = model.config
    limit = getattr(config, "max_position_embeddings", None) or PROMPT + NEW + 2
    length = max(1, min(PROMPT, limit // 2))
    count = max(1, min(NEW, limit - length - 2))  # some tables begin with positions that no token has
    prompt = tokens_for(model, words)["input_ids"][:, :length]
    source, start = None, prompt
    if config.is_encoder_decoder:
        starts = [getattr(config, f"{name}_token_id", None) for name in ("decoder_start", "bos", "eos")]
        first = next(each for each in (*starts, 0) if isinstance(each, int))
        source, start = prompt, prompt.new_full((len(prompt), 1), first)
    written, theirs = write(source, start, count)
    text = torch.cat([start, written[:, :-1]], 1)
    inputs = {"input_ids": text} if source is None else {"input_ids": source, "decoder_input_ids": text}
    ours = model(**inputs).logits[:, start.shape[1] - 1 :].float()
    never = torch.tensor(list(barred), dtype=torch.long)
    best = ours.index_fill(-1, never, -torch.inf).max(-1).values
    chosen = ours.gather(-1, written[..., None])[..., 0]
    ours, theirs = (logits.index_fill(-1, never, 0) for logits in (ours, theirs))
    found = furthest((("logits", ours, theirs), ("logits of the greedy tokens", best, chosen)), dtype)
    return dataclasses.replace(found, tokens=(int((best == chosen).sum()), written.numel()))


def greedily(step: Callable[[Tensor], Tensor], text: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Tokens written by an engine that computes logits (B, T, V) of what is new in a text (B, T), and holds the rest;
    with the logits that they were taken from."""
    written: list[Tensor] = []
    logits: list[Tensor] = []
    for _ in range(count):
        logits.append(step(written[-1] if written else text)[:, -1].float())
        written.append(logits[-1].argmax(-1, keepdim=True))
    return torch.cat(written, 1), torch.stack(logits, 1)


def by_model(model: PreTrainedModel) -> Writer:
    """A model of transformers, with its cache."""

    def write(source: Tensor | None, text: Tensor, count: int) -> tuple[Tensor, Tensor]:
        held = {} if source is None else {"encoder_outputs": model.get_encoder()(input_ids=source)}
        name = "input_ids" if source is None else "decoder_input_ids"
        cache = None

        def step(new: Tensor) -> Tensor:
            nonlocal cache
            outputs = model(**{name: new}, **held, past_key_values=cache, use_cache=True)
            cache = outputs.past_key_values
            return outputs.logits

        return greedily(step, text, count)

    return write


def row_by_row(write: Writer) -> Writer:
    """An engine that takes one text at a time."""

    def rows(source: Tensor | None, text: Tensor, count: int) -> tuple[Tensor, Tensor]:
        each = [
            write(None if source is None else source[row : row + 1], text[row : row + 1], count)
            for row in range(len(text))
        ]
        tokens, logits = zip(*each, strict=True)
        return torch.cat(tokens), torch.cat(logits)

    return rows


def tokens_for(model: PreTrainedModel, words: int | None = None) -> dict[str, Tensor]:
    """Random tokens, of the first so many `words` or of all."""
    config = model.config
    choices = (2,) if type(model).__name__.endswith("ForMultipleChoice") else ()
    limit = min(LENGTH, getattr(config, "max_position_embeddings", LENGTH) or LENGTH)
    shape = (ROWS, *choices, max(1, limit - 2))  # some tables begin with positions that no token has
    generator = torch.Generator().manual_seed(0)

    def draw(size: int) -> Tensor:
        ids, pad = torch.randint(0, size, shape, generator=generator), config.pad_token_id
        # A head for whole texts looks for the last token that is not padding.
        return ids if pad is None else ids.masked_fill(ids == pad, (pad + 1) % size)

    words = words or model.get_input_embeddings().num_embeddings
    inputs = {"input_ids": draw(words)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = draw(getattr(config, "decoder_vocab_size", None) or words)
    return inputs
