"""Files that `scratch-transformer export --to onnx` has written, run by any engine, beside the model: `run` gives
named arrays for named arrays."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests import tiny

Arrays = dict[str, np.ndarray]
Run = Callable[[Arrays], Arrays]
NEAR = {"rtol": 0, "atol": 1e-5}
NEW = 20


def given(model: PreTrainedModel, batch: int, length: int, side: str) -> tuple[dict[str, Tensor], Arrays]:
    tensors = tiny.inputs(model, batch, length, padding=side, seed=length)
    return tensors, {name: tensor.numpy() for name, tensor in tensors.items()}


def compare_encoder(run: Run, model: PreTrainedModel) -> None:
    for batch, length, side in ((1, 2, "right"), (3, 7, "left"), (5, 31, "right")):
        tensors, arrays = given(model, batch, length, side)
        if model.config.type_vocab_size:
            arrays["token_type_ids"] = np.arange(batch * length).reshape(batch, length) % 2
            tensors["token_type_ids"] = torch.from_numpy(arrays["token_type_ids"])
        with torch.no_grad():
            ours = model(**tensors)
        theirs = run(arrays)
        assert theirs.keys() == ours.keys()
        for name, each in theirs.items():
            expected, actual = ours[name], torch.from_numpy(each)
            if actual.ndim == 3:
                real = tensors["attention_mask"].bool()
                expected, actual = expected[real], actual[real]
            torch.testing.assert_close(actual, expected, **NEAR)


def compare_decoder(run: Run, model: PreTrainedModel) -> None:
    """Logits of the prompts, computed in two parts, and the tokens that follow them one by one."""
    config = model.config
    tensors, arrays = given(model, 4, 9, "left")
    ids, mask = arrays["input_ids"], arrays["attention_mask"]
    widths = {"key": config.head_dim, "value": config.value_head_dim}
    held = {
        f"past_key_values.{layer}.{part}": np.zeros((len(ids), config.num_key_value_heads, 0, width), np.float32)
        for layer in range(config.num_hidden_layers)
        for part, width in widths.items()
    }
    logits, cut = [], 5
    for new, seen in ((ids[:, :cut], mask[:, :cut]), (ids[:, cut:], mask)):
        outputs = run({"input_ids": new, "attention_mask": seen, **held})
        held = passed_on(outputs)
        logits.append(outputs["logits"])
    written = [last(outputs)]
    while len(written) < NEW:
        mask = np.pad(mask, ((0, 0), (0, 1)), constant_values=1)
        outputs = run({"input_ids": written[-1], "attention_mask": mask, **held})
        held = passed_on(outputs)
        written.append(last(outputs))
    with torch.no_grad():
        expected = model(**tensors).logits
    real = tensors["attention_mask"].bool()
    torch.testing.assert_close(torch.from_numpy(np.concatenate(logits, 1))[real], expected[real], **NEAR)
    compare_tokens(written, greedy(model, tensors)[:, ids.shape[1] :])


def compare_translator(run: Callable[[str], Run], model: PreTrainedModel) -> None:
    tensors, arrays = given(model, 4, 9, "right")
    mask = {"encoder_attention_mask": arrays["attention_mask"]}
    states = run("encoder_model")(arrays)["last_hidden_state"]
    start = np.full((len(states), 1), model.config.decoder_start_token_id)
    outputs = run("decoder_model")({"input_ids": start, "encoder_hidden_states": states, **mask})
    held, written, after = passed_on(outputs), [last(outputs)], run("decoder_with_past_model")
    while len(written) < NEW:
        outputs = after({"input_ids": written[-1], **mask, **held})
        held |= passed_on(outputs)
        written.append(last(outputs))
    compare_tokens(written, greedy(model, tensors)[:, 1:])


def passed_on(outputs: Arrays) -> Arrays:
    """What is held of earlier tokens, as the next call takes it."""
    return {name.replace("present", "past_key_values"): each for name, each in outputs.items() if name != "logits"}


def last(outputs: Arrays) -> np.ndarray:
    return outputs["logits"][:, -1].argmax(-1)[:, None]


def greedy(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    return model.generate(**inputs, max_new_tokens=NEW, do_sample=False)


def compare_tokens(theirs: list[np.ndarray], ours: Tensor) -> None:
    assert len({tuple(row) for row in ours.tolist()}) > 1 and len(ours.unique()) > 3
    assert np.concatenate(theirs, 1).tolist() == ours.tolist()
