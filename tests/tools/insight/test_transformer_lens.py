"""TransformerLens, through the Llama export."""

import torch
from torch.testing import assert_close
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_scratch_transformer import ScratchDecoderForCausalLM
from hf_scratch_transformer.conversion import convert_folder
from hf_scratch_transformer.tokenization import config_fields, train_tokenizer
from tests import tiny

PACKAGE = "transformer-lens"
LIKE_LLAMA = {"hidden_act": "swiglu", "norm_type": "rms_norm", "position_embedding_type": "rotary"}


def test_cache(texts, tmp_path):
    """a decoder, through its Llama export: logits, and attention and what goes through each block, = ours"""
    tokenizer = train_tokenizer(texts, family="decoder", vocab_size=320, min_frequency=1)
    fields = config_fields(tokenizer, "decoder") | LIKE_LLAMA
    model = tiny.model(ScratchDecoderForCausalLM, **fields, attn_implementation="eager")
    model.save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    path = str(tmp_path / "llama")
    convert_folder(tmp_path / "ours", path, "llama")
    native = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    bridge = TransformerBridge.boot_transformers(path, hf_model=native, tokenizer=AutoTokenizer.from_pretrained(path))
    ids = tiny.tokens(model.config.vocab_size, 3, 7)
    with torch.no_grad():
        ours = model(input_ids=ids, output_attentions=True, output_hidden_states=True)
        logits, cache = bridge.run_with_cache(ids)
    assert_close(logits, ours.logits, atol=1e-5, rtol=1e-5)
    for layer in range(model.config.num_hidden_layers):
        assert_close(cache[f"blocks.{layer}.hook_resid_pre"], ours.hidden_states[layer], atol=1e-5, rtol=1e-5)
        assert_close(cache[f"blocks.{layer}.attn.hook_pattern"], ours.attentions[layer], atol=1e-5, rtol=1e-5)
