"""A text while a model writes it, token by token, with how fast it does.

`generate` runs in a thread of its own, and whoever asked looks at it some twenty times a second. Closing the
iterator ends the thread with the token that it is at.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from threading import Event
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

PERIOD = 0.05  # seconds between two looks
_watches: "WeakSet[Watch]" = WeakSet()


class GumbelNoise(LogitsProcessor):
    """Makes of the greedy choice a draw from the softmax of the logits (Gumbel, 1954; Maddison et al., 2014), with
    random numbers of its own: texts drawn at the same time do not disturb each other, as they would through torch's."""

    def __init__(self, temperature: float, seed: int) -> None:
        self.temperature = temperature
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # (B, T), (B, V) -> (B, V)
        noise = torch.empty(scores.shape).exponential_(generator=self.generator).log()
        return scores / self.temperature - noise.to(scores.device)


class Watch(StoppingCriteria):
    """What `generate` has written so far, of beams the best, and when; says after each token whether that is enough."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.times: list[float] = []  # seconds after the start, one for each token
        self.ids: list[int] = []  # (T), with what the decoder was given
        self.stopped = Event()
        _watches.add(self)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # (B, T) -> (B)
        self.ids = input_ids[0].tolist()
        self.times.append(time.perf_counter() - self.started)
        return torch.full((len(input_ids),), self.stopped.is_set(), device=input_ids.device)

    def speed(self) -> str:
        """Time to the first token, and how many a second came after it."""
        times = self.times.copy()  # which grows meanwhile
        if not times:
            return ""
        first, seconds = f"first token after {times[0]:.2f} s", times[-1] - times[0]
        return f"{first}, {(len(times) - 1) / seconds:.1f} tokens/s" if seconds else first


def written(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, inputs: Any, **options: Any
) -> Iterator[tuple[str, str]]:
    """The text so far and a note on its speed, some twenty times a second; what `generate` returns comes last.

    Args:
        inputs: one row, as the tokenizer gives it.
        options: of `generate`, beside the model's own settings.

    Raises:
        Exception: what `generate` does.
    """
    beams = options.get("num_beams") or model.generation_config.num_beams or 1
    note = f"beam search, {beams} beams" if beams > 1 else ""
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    watch = Watch()
    options |= {"stopping_criteria": [watch], "num_return_sequences": 1, "return_dict_in_generate": False}
    with ThreadPoolExecutor(1, "generate") as pool:
        work = pool.submit(model.generate, **inputs, **options)
        try:
            while wait([work], PERIOD).not_done:
                # Of a letter in several tokens, the first ones are no text.
                text = decode(watch.ids).rstrip("\N{REPLACEMENT CHARACTER}")
                yield text, _joined(note and f"{note}: the best so far", watch.speed())
            yield decode(work.result()[0]), _joined(note, watch.speed())
        finally:
            watch.stopped.set()


def stop_all() -> None:
    """End all texts that are being written: a process that is to end waits for its threads."""
    for watch in list(_watches):
        watch.stopped.set()


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))
