"""The three objectives: each says how rows become batches and what is predicted; the loop around them is one."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedTokenizerFast,
)

from hf_scratch_transformer.embedding import longest_output
from hf_scratch_transformer.tokenization import sides

from .batches import IGNORED, POOL, Draws, Key, bucket, mixed_rows, permuted, pool_rows
from .corpus import Corpus
from .metrics import least_risk
from .recipe import Recipe
from .sections import RecipeError
from .sharding import is_sharded

Batch = dict[str, Tensor]
PARTS = 50  # of a test, for intervals, where it has as many rows or windows
SHOWN = 32  # tokens of a text that a sample shows, and as many of what a causal LM makes of it


class Objective(ABC):
    """What differs between the objectives. `targets` names the batch entry that holds the labels."""

    auto_model: ClassVar[Any]
    targets: ClassVar[str] = "labels"

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> None:
        self.recipe, self.tokenizer = recipe, tokenizer
        # What a text is cut to, or filled up to, is for a model that has been trained.
        self.sides = dict(zip(("source", "target"), sides(tokenizer), strict=True))
        for side in self.sides.values():
            side.backend_tokenizer.no_truncation()
            side.backend_tokenizer.no_padding()

    def encode(self, texts: list[str], column: str) -> list[list[int]]:
        """Token ids of each text, special tokens included; several threads may ask at once."""
        backend = self.sides.get(column, self.tokenizer).backend_tokenizer
        return [encoding.ids for encoding in backend.encode_batch_fast(texts)]

    @abstractmethod
    def plan(self, corpus: Corpus, key: Key | None, pool: int = 0) -> list[np.ndarray]:
        """The batches of one pool of a pass over the corpus, [rows, ...] references into it each.

        Without a key (seed, purpose, epoch, part) those of the whole pass, in a fixed order.
        """

    @abstractmethod
    def parts(self, corpus: Corpus) -> list[list[np.ndarray]]:
        """The batches of the whole pass, in parts of like size, however large a batch is: intervals are told from how
        much these differ."""

    @abstractmethod
    def collate(self, corpus: Corpus, item: np.ndarray, draws: Draws, step: int) -> Batch:
        """A batch of some rows of an item of the plan. All that is random in it comes from `draws`, row by row."""

    def loss(self, model: torch.nn.Module, batch: Batch, label_smoothing: float = 0.0) -> Tensor:
        """Cross-entropy in nats, summed over the targets of the batch.

        Our models compute head and loss on the targets alone (`loss_only`); from others the logits are taken.
        """
        if getattr(unwrapped(model), "supports_loss_only", False):
            return model(**batch, num_items_in_batch=1, loss_only=True, label_smoothing=label_smoothing).loss
        logits, targets = self.predict(model, batch)
        return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=label_smoothing)

    def predict(self, model: torch.nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits [targets, vocabulary] and the targets [targets] themselves."""
        inputs = {name: values for name, values in batch.items() if name != self.targets}
        labels = batch[self.targets]
        is_target = labels != IGNORED
        return model(**inputs).logits[is_target].float(), labels[is_target]

    def score(self, model: torch.nn.Module, batch: Batch) -> dict[str, Tensor]:
        """What an evaluation adds up over batches."""
        return {"loss_sum": self.loss(model, batch)}

    def summary(self, sums: Mapping[str, float], targets: int, corpus: Corpus) -> dict[str, float]:
        """The metrics, from what `score` added up over a corpus with that many targets."""
        loss = sums["loss_sum"] / targets
        return {"loss": loss, "perplexity": math.exp(min(loss, 700))}

    def samples(self, model: Any, corpus: Corpus, count: int) -> list[dict[str, str]]:
        """What the model makes of some of the corpus, for people to read."""
        return []

    def examples(self, corpus: Corpus) -> int:
        """How many rows one pass holds."""
        return len(next(iter(corpus.columns.values())).lengths)

    def end(self, corpus: Corpus) -> int:
        """How many rows, or tokens of the stream, can be the input of a prediction."""
        return self.examples(corpus)

    def pools(self, corpus: Corpus) -> int:
        """How many pools a pass over the corpus has, of which the last may be empty."""
        return -(-self.examples(corpus) // POOL)

    @property
    def _weights(self) -> list[float]:
        """Of the sources that are mixed."""
        return [source.weight for source in self.recipe.data.sources]


def _of(recipe: Recipe) -> str:
    return "" if recipe.tokenizer.path is None else f".path: {recipe.tokenizer.path}"


class Translation(Objective):
    """Source to target with teacher forcing, in length-bucketed batches."""

    auto_model = AutoModelForSeq2SeqLM

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(recipe, tokenizer)
        if tokenizer.eos_token_id is None or tokenizer.pad_token_id is None:
            raise RecipeError(f"tokenizer{_of(recipe)}: a translator needs an end-of-sentence and a padding token")

    def plan(self, corpus: Corpus, key: Key | None, pool: int = 0) -> list[np.ndarray]:
        rng = None if key is None else np.random.default_rng(key)
        if key is None or not self._weights:
            rows = pool_rows(self.examples(corpus), pool, rng)
        else:
            counts = [each.rows for each in corpus.stretches]
            # Of rows with many tokens fewer make up a share of the tokens.
            rates = [w * each.rows / each.tokens for w, each in zip(self._weights, corpus.stretches, strict=True)]
            firsts = np.cumsum([0, *counts])
            parts = mixed_rows(counts, rates, key, pool)
            drawn = [firsts[source] + permuted(some, counts[source], draw) for source, some, draw in parts]
            rows = np.concatenate([firsts[:0], *drawn])
        return self._batches(corpus, rows, rng)

    def _batches(self, corpus: Corpus, rows: np.ndarray, rng: np.random.Generator | None = None) -> list[np.ndarray]:
        lengths = np.stack([corpus.columns[side].lengths[rows] for side in ("source", "target")], axis=1)
        return [rows[batch] for batch in bucket(lengths, self.recipe.data.batch_tokens, rng)]

    def parts(self, corpus: Corpus) -> list[list[np.ndarray]]:
        # Batches of the plan are of like length, on which the loss of a token depends, and lie further apart than rows.
        rows = np.random.default_rng(0).permutation(self.examples(corpus))
        return [self._batches(corpus, rows[part::PARTS]) for part in range(min(PARTS, len(rows)))]

    def collate(self, corpus: Corpus, item: np.ndarray, draws: Draws, step: int) -> Batch:
        pad = self.tokenizer.pad_token_id
        source = corpus.columns["source"].padded(item, pad)
        batch = {"input_ids": source, "labels": corpus.columns["target"].padded(item, IGNORED)}
        lengths = corpus.columns["source"].lengths[item]
        batch["attention_mask"] = (np.arange(source.shape[1]) < lengths[:, None]).astype(np.int64)
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    def loss(self, model: torch.nn.Module, batch: Batch, label_smoothing: float = 0.0) -> Tensor:
        alpha = self.recipe.optimisation.r_drop
        if not (alpha and model.training):
            return super().loss(model, batch, label_smoothing)
        # R-Drop (Wu et al. 2021): the mean loss under two dropout masks, and the divergence of what they predict.
        # Both terms carry half the paper's scale, so that a learning rate means the same with and without.
        logits, targets = self.predict(model, {name: values.repeat(2, 1) for name, values in batch.items()})
        loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=label_smoothing) / 2
        one, two = logits.log_softmax(-1).chunk(2)
        divergence = ((one.exp() - two.exp()) * (one - two)).sum() / 2  # KL(one, two) + KL(two, one), halved
        return loss + alpha / 2 * divergence

    def predict(self, model: torch.nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        translator: Any = unwrapped(model)
        shifted = translator.prepare_decoder_input_ids_from_labels(batch["labels"])
        return super().predict(model, {**batch, "decoder_input_ids": shifted})

    def alike(self, corpus: Corpus, rows: np.ndarray, num_beams: int) -> list[np.ndarray]:
        """Rows in batches of like length, to be decoded together: little time goes into padding and finished rows."""
        lengths = corpus.columns["source"].lengths[rows][:, None]
        # A beam is a row of its own, with a cache as long as the output.
        most = max(self.recipe.data.batch_tokens // num_beams, int(lengths.max()))
        return [rows[batch] for batch in bucket(lengths, most)]

    @torch.no_grad()  # not `inference_mode`, of which sharded weights that are gathered in it would stay
    def translate(self, model: Any, corpus: Corpus, rows: np.ndarray, num_beams: int, choices: int = 1) -> list[str]:
        """Translations of some rows, in their order: of each the most probable, or of that many `choices` that of least
        risk, for which logits are held as in a step of training."""
        encoded = self.collate(corpus, rows, Draws((0,), rows), 0)
        del encoded["labels"]
        limit = longest_output(encoded["input_ids"].shape[1], self.recipe.data.max_length)
        output = model.generate(
            **{name: values.to(model.device) for name, values in encoded.items()},
            num_beams=num_beams,
            num_return_sequences=choices,
            max_new_tokens=limit,
            length_penalty=self.recipe.evaluation.length_penalty if num_beams > 1 else None,
            return_dict_in_generate=choices > 1,
            output_scores=choices > 1,
            synced_gpus=is_sharded(model),
        )
        written = output.sequences if choices > 1 else output
        texts = [text.strip() for text in self.tokenizer.batch_decode(written, skip_special_tokens=True)]
        if choices == 1:
            return texts
        found = model.compute_transition_scores(written, output.scores, output.beam_indices).sum(1).tolist()
        beams = (slice(first, first + choices) for first in range(0, len(texts), choices))
        return [least_risk(texts[each], found[each]) for each in beams]


class _Windows(Objective):
    """What the two language models share: documents joined into one stream, cut into full windows."""

    ahead: ClassVar[int] = 0  # how far behind an input its target lies

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(recipe, tokenizer)
        self.window = recipe.data.window

    def end(self, corpus: Corpus) -> int:
        return len(corpus.columns["text"].tokens) - self.ahead

    def pools(self, corpus: Corpus) -> int:
        return -(-(self.end(corpus) // self.window + 2 + len(corpus.stretches)) // POOL)

    def plan(self, corpus: Corpus, key: Key | None, pool: int = 0) -> list[np.ndarray]:
        """Batches of windows, each [windows, 3]: first token, the one after the last, first that counts."""
        size, end = self.window, self.end(corpus)
        if key is None:
            step = self.recipe.evaluation.stride or size
            windows = _tiles(pool_rows(_count(end, size, step)), end, size, size, step)
        else:
            rng = np.random.default_rng(key)
            if self._weights:
                rng = np.random.default_rng((*key, pool))
                windows = rng.permutation(self._mixed(corpus, key, pool, rng))
            elif self.recipe.data.random_windows:
                windows = self._random(len(pool_rows(max(1, end // size), pool, rng)), end, rng)
            else:
                # Another phase each time: no token is always the first of its window, and none is left out.
                phase = int(rng.integers(1, size + 1))
                windows = rng.permutation(
                    _tiles(pool_rows(_count(end, phase, size), pool, rng), end, size, phase, size)
                )
        return self._batches(windows)

    def _batches(self, windows: np.ndarray) -> list[np.ndarray]:
        rows = max(1, self.recipe.data.batch_tokens // self.window)
        return [windows[start : start + rows] for start in range(0, len(windows), rows)]

    def parts(self, corpus: Corpus) -> list[list[np.ndarray]]:
        # Stretches of the text, since what stands beside each other is alike.
        windows = np.concatenate([np.zeros((0, 3), np.int64), *self.plan(corpus, None)])
        return [self._batches(stretch) for stretch in np.array_split(windows, max(1, min(PARTS, len(windows))))]

    def _random(self, count: int, end: int, rng: np.random.Generator) -> np.ndarray:
        starts = rng.integers(0, max(1, end - self.window + 1), size=count)
        return np.stack([starts, np.minimum(starts + self.window, end), starts], axis=1)

    def _mixed(self, corpus: Corpus, key: Key, pool: int, rng: np.random.Generator) -> np.ndarray:
        """Windows of several sources, each within one of them."""
        size, parts = self.window, [np.zeros((0, 3), np.int64)]
        firsts = np.cumsum([0, *(each.tokens for each in corpus.stretches)])
        ends = [each.tokens - self.ahead for each in corpus.stretches]
        counts = [end // size + 1 for end in ends]
        for source, numbers, draw in mixed_rows(counts, self._weights, key, pool):
            end = ends[source]
            if self.recipe.data.random_windows:
                windows = self._random(len(numbers), end, rng)
            else:
                # Of all phases, those that leave the same number of windows.
                left = end % size
                phase = int(draw.integers(max(left, 1), size + (left > 0)))
                windows = _tiles(permuted(numbers, counts[source], draw), end, size, phase, size)
            parts.append(windows + firsts[source])
        return np.concatenate(parts)

    def cut(self, corpus: Corpus, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Indices into the stream and whether they count, both [windows, window], and positions in each document."""
        starts, stops, counted = windows[:, :1], windows[:, 1:2], windows[:, 2:]
        indices = starts + np.arange(int((stops - starts).max()))
        counts = (counted <= indices) & (indices < stops)
        indices = np.minimum(indices, stops - 1)
        if not self.recipe.data.separate_documents:
            return indices, counts, None
        offsets = corpus.columns["text"].offsets
        document = offsets[np.searchsorted(offsets, indices, side="right") - 1]
        return indices, counts, indices - np.maximum(document, starts)


def _count(end: int, phase: int, step: int) -> int:
    """How many windows `_tiles` cuts a stream of `end` predictions into."""
    return 1 + max(0, -((phase - end) // step))


def _tiles(numbers: np.ndarray, end: int, size: int, phase: int, step: int) -> np.ndarray:
    """[numbers, 3] windows of a stream: first token, the one after the last, first that counts.

    The first ends at `phase`, each other `step` later than the one before it, where what counts in it begins.
    """
    counted = np.where(numbers > 0, phase + (numbers - 1) * step, 0)
    return np.stack([np.maximum(counted + step - size, 0), np.minimum(phase + numbers * step, end), counted], axis=1)


class CausalLM(_Windows):
    """The next token, from those before it."""

    auto_model = AutoModelForCausalLM
    ahead = 1
    targets = "shift_labels"

    def encode(self, texts: list[str], column: str) -> list[list[int]]:
        ids = super().encode(texts, column)
        # One row that is the whole text has no end to learn.
        whole = self.recipe.data.sample_by == "document" and len(texts) == 1
        if not whole and self.tokenizer.eos_token_id is not None:
            for row in ids:
                row.append(self.tokenizer.eos_token_id)
        return ids

    def collate(self, corpus: Corpus, item: np.ndarray, draws: Draws, step: int) -> Batch:
        stream = corpus.columns["text"].tokens
        indices, counts, positions = self.cut(corpus, item)
        following = stream[indices + 1].astype(np.int64)
        batch = {"input_ids": stream[indices], "shift_labels": np.where(counts, following, IGNORED)}
        if positions is not None:
            batch["position_ids"] = positions
        return {name: torch.from_numpy(values.astype(np.int64)) for name, values in batch.items()}

    @torch.inference_mode()
    def samples(self, model: Any, corpus: Corpus, count: int) -> list[dict[str, str]]:
        """Beginnings, from all over the corpus, and how the model goes on, its tokens drawn at random."""
        stream = corpus.columns["text"].tokens
        length = min(SHOWN, self.window // 2, len(stream))
        starts = np.linspace(0, len(stream) - length, count, dtype=np.int64)[:, None]
        texts = torch.from_numpy(stream[starts + np.arange(length)].astype(np.int64)).to(model.device)
        if not count:
            return []
        torch.manual_seed(self.recipe.seed)  # each step has its own seed, so this one changes none
        options: dict[str, Any] = {"do_sample": True, "max_new_tokens": length, "synced_gpus": is_sharded(model)}
        options["pad_token_id"] = self.tokenizer.pad_token_id
        written = model.generate(input_ids=texts, attention_mask=torch.ones_like(texts), **options)
        pairs = zip(texts, written[:, length:], strict=True)
        return [{"text": self._documents(text), "output": self._documents(output)} for text, output in pairs]

    def _documents(self, stream: Tensor) -> str:
        """Tokens of several documents as text, each on a line of its own."""
        lines: list[list[int]] = [[]]
        for token in stream.tolist():
            lines = [*lines, []] if token == self.tokenizer.eos_token_id else [*lines[:-1], [*lines[-1], token]]
        return "\n".join(self.tokenizer.batch_decode(lines, skip_special_tokens=True)).strip("\n")

    def summary(self, sums: Mapping[str, float], targets: int, corpus: Corpus) -> dict[str, float]:
        return super().summary(sums, targets, corpus) | {
            "bits_per_byte": sums["loss_sum"] / math.log(2) / corpus.bytes,
            "word_perplexity": math.exp(min(sums["loss_sum"] / corpus.words, 700)),
        }


class MaskedLM(_Windows):
    """Masked tokens, from both sides (BERT, Devlin et al. 2019)."""

    auto_model = AutoModelForMaskedLM

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(recipe, tokenizer)
        if tokenizer.mask_token_id is None:
            raise RecipeError(f"tokenizer{_of(recipe)}: masked language modelling needs a mask token")
        pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        self.special = np.isin(np.arange(len(pieces)), tokenizer.all_special_ids)
        byte_level = any(piece.startswith("Ġ") for piece in pieces)
        inside = [not piece.startswith("Ġ") if byte_level else piece.startswith("##") for piece in pieces]
        self.inside = np.array(inside) & ~self.special  # pieces that go on with the word before them

    def fraction(self, step: int) -> float:
        """The share of tokens masked at a step: constant, or on a straight line between two values."""
        first, last = self.recipe.optimisation.mask_fraction[0], self.recipe.optimisation.mask_fraction[-1]
        return first + (last - first) * min(1.0, step / self.recipe.optimisation.max_steps)

    def collate(self, corpus: Corpus, item: np.ndarray, draws: Draws, step: int) -> Batch:
        indices, counts, positions = self.cut(corpus, item)
        tokens = corpus.columns["text"].tokens[indices].astype(np.int64)
        # As many for each row as it could need: how wide the others are makes no difference.
        draw, share, other = draws.random(3, self.window)[:, :, : tokens.shape[1]].transpose(1, 0, 2)
        if self.recipe.optimisation.whole_word_masking:
            word = np.maximum.accumulate(np.where(self.inside[tokens], 0, np.arange(tokens.shape[1])), axis=1)
            draw = np.take_along_axis(draw, word, axis=1)  # one draw a word: its pieces are masked together
        fraction = self.fraction(step)
        masked = (draw < fraction) & counts & ~self.special[tokens]
        # Of the masked tokens 80% show the mask, 10% another token and 10% themselves.
        input_ids = np.where(masked & (share < 0.8), self.tokenizer.mask_token_id, tokens)
        input_ids = np.where(masked & (share >= 0.9), (other * len(self.special)).astype(np.int64), input_ids)
        batch = {"input_ids": input_ids, "labels": np.where(masked, tokens, IGNORED)}
        if positions is not None:
            batch["position_ids"] = positions
        elif not counts.all():
            batch["attention_mask"] = counts.astype(np.int64)
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    @torch.inference_mode()
    def samples(self, model: Any, corpus: Corpus, count: int) -> list[dict[str, str]]:
        """Texts with masks, what was there, and what the model puts there."""
        windows = self.plan(corpus, None)[0][:count]
        if not count:
            return []
        windows[:, 1] = np.minimum(windows[:, 1], windows[:, 0] + SHOWN)
        draws, last = Draws((self.recipe.seed,), np.arange(len(windows))), self.recipe.optimisation.max_steps
        batch = {name: values.to(model.device) for name, values in self.collate(corpus, windows, draws, last).items()}
        labels = batch.pop(self.targets)
        masked, guesses = labels != IGNORED, model(**batch).logits.argmax(-1)
        rows = {
            "text": batch["input_ids"],
            "reference": torch.where(masked, labels, batch["input_ids"]),
            "output": torch.where(masked, guesses, batch["input_ids"]),
        }
        decoded = [self.tokenizer.batch_decode(ids) for ids in rows.values()]
        return [dict(zip(rows, texts, strict=True)) for texts in zip(*decoded, strict=True)]

    def score(self, model: torch.nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits, targets = self.predict(model, batch)
        correct = (logits.argmax(-1) == targets).sum()
        return {"loss_sum": F.cross_entropy(logits, targets, reduction="sum"), "correct": correct}

    def summary(self, sums: Mapping[str, float], targets: int, corpus: Corpus) -> dict[str, float]:
        return super().summary(sums, targets, corpus) | {"masked_accuracy": sums["correct"] / targets}


OBJECTIVES: dict[str, type[Objective]] = {"translation": Translation, "causal_lm": CausalLM, "masked_lm": MaskedLM}


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside DistributedDataParallel and torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner
