"""MLX on a processor, by mlx-lm: a folder of its own that it opens as any other, the native export of a decoder."""

import pytest
import torch

from hf_scratch_transformer import ScratchDecoderForCausalLM
from hf_scratch_transformer.cli import main
from tests import tiny

PACKAGE = "mlx-lm"
COMMON = {"eos_token_id": None, "initializer_range": 0.3, "max_position_embeddings": 64}
LIKE_LLAMA = {"norm_type": "rms_norm", "hidden_act": "swiglu", "tie_word_embeddings": False}
OPTIONS = {"llama": LIKE_LLAMA, "qwen3": LIKE_LLAMA | {"use_qk_norm": True}}
NEW = 20


@pytest.mark.parametrize("export", OPTIONS)
def test_decoder(export, tmp_path):
    """a decoder, its Llama or Qwen3 export, on a processor: logits = ours within 1e-4, greedy tokens = ours"""
    try:
        import mlx.core as mx
        from mlx_lm.generate import generate_step
        from mlx_lm.utils import load_model
    except (ImportError, OSError) as error:
        pytest.skip(str(error).splitlines()[0])
    ours = tiny.model(ScratchDecoderForCausalLM, **COMMON | OPTIONS[export])
    ours.save_pretrained(tmp_path / "ours")
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / export), "--to", export]) == 0
    theirs, _ = load_model(tmp_path / export)
    prompts = tiny.tokens(ours.config.vocab_size, 3, 7)
    with torch.no_grad():
        expected = ours(prompts).logits
    actual = torch.tensor(theirs(mx.array(prompts.numpy())).tolist())
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    greedy = ours.generate(prompts, max_new_tokens=NEW, do_sample=False)[:, prompts.shape[1] :].tolist()
    assert len({tuple(row) for row in greedy}) == len(greedy)
    for prompt, row in zip(prompts, greedy, strict=True):
        steps = generate_step(mx.array(prompt.numpy()), theirs, max_tokens=NEW)
        assert [int(token) for token, _ in steps] == row
