"""torchtitan, whose trainer takes a `ModelSpec`, in a process of its own. It takes a GPU for granted: told of a
processor, it only lacks a monitor of memory and a barrier of devices, which are left out."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

from hf_scratch_transformer import ScratchDecoderForCausalLM
from hf_scratch_transformer.conversion import convert_folder
from tests import tiny

LIKE_LLAMA = {"hidden_act": "swiglu", "norm_type": "rms_norm", "position_embedding_type": "rotary"}
STEPS = 5
PROGRAM = """
import json, sys
from dataclasses import dataclass
import torch
torch._utils._get_available_device_type = lambda: "cpu"
from transformers import AutoConfig, AutoModelForCausalLM
from torchtitan.components import metrics
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TrainingConfig
from torchtitan.distributed import utils
from torchtitan.protocols import BaseModel, ModelSpec
from torchtitan.trainer import Trainer

folder, batches, output = sys.argv[1], torch.tensor(json.loads(sys.argv[2])), sys.argv[3]
losses = []


class NoMemory:
    device_name = "a processor"
    get_peak_stats = reset_peak_stats = lambda self: metrics.DeviceMemStats(*[0] * len(metrics.DeviceMemStats._fields))


metrics.build_device_memory_monitor = NoMemory
utils.set_pg_timeouts = lambda **_: None


class Model(BaseModel):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        def update_from_config(self, *, config, **_):
            pass

        def get_nparams_and_flops(self, model, seq_len):
            return sum(each.numel() for each in model.parameters()), 0

    def __init__(self, config):
        super().__init__()
        native = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        self.native = AutoModelForCausalLM.from_config(native, trust_remote_code=True)

    def verify_module_protocol(self):
        pass

    def init_states(self, *, buffer_device=None):
        read = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        self.native.load_state_dict(read.state_dict())
        for empty, full in zip(self.native.buffers(), read.buffers(), strict=True):
            empty.copy_(full)

    def forward(self, tokens):
        return self.native(input_ids=tokens, use_cache=False).logits


class Batches(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, **_):
        pass

    def __iter__(self):
        return (({"input": each[:, :-1]}, each[:, 1:]) for each in batches)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Tokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    encode = decode = get_vocab_size = None


class Losses(metrics.MetricsProcessor):
    @dataclass(kw_only=True, slots=True)
    class Config(metrics.MetricsProcessor.Config):
        pass

    def log(self, step, loss, *_, **__):
        losses.append(loss)


steps, rows, length = batches.shape
Trainer(Trainer.Config(
    model_spec=ModelSpec(
        name="scratch", flavor="tiny", model=Model.Config(), parallelize_fn=lambda model, **_: model,
        pipelining_fn=None, post_optimizer_build_fn=None, state_dict_adapter=None,
    ),
    dump_folder=output, loss=CrossEntropyLoss.Config(), tokenizer=Tokenizer.Config(), dataloader=Batches.Config(),
    metrics=Losses.Config(log_freq=1), optimizer=default_adamw(lr=0.01),
    lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.8, decay_type="linear", min_lr_factor=0.0),
    training=TrainingConfig(local_batch_size=rows, seq_len=length - 1, steps=steps, disable_cuda_graphs=True),
)).train()
print("RESULT", json.dumps(losses))
"""


def losses(folder, batches, output):
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    alone |= {"MASTER_PORT": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM, str(folder), json.dumps(batches.tolist()), str(output)]
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | alone, check=False)
    for line in found.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    pytest.fail((found.stderr or found.stdout).strip().splitlines()[-1])


def test_trained(tmp_path):
    """its trainer on a processor, by a ModelSpec for models of transformers: losses of 5 steps = its Llama export's"""
    ours = tiny.model(ScratchDecoderForCausalLM, **LIKE_LLAMA)
    ours.save_pretrained(tmp_path / "ours")
    convert_folder(tmp_path / "ours", tmp_path / "llama", "llama")
    batches = tiny.tokens(ours.config.vocab_size, STEPS, 3, 9)
    expected, found = (
        torch.tensor(losses(tmp_path / name, batches, tmp_path / "output")) for name in ("llama", "ours")
    )
    assert len(found) == STEPS
    assert_close(found, expected, rtol=0, atol=1e-4)
    with torch.no_grad():
        first = ours(input_ids=batches[0], labels=batches[0]).loss
    assert_close(found[0], first, rtol=0, atol=1e-5)
