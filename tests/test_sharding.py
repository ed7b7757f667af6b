"""FSDP2: two processes with half of everything each train, save, resume and publish as one process does."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from transformers import AutoModel, AutoTokenizer, LlamaConfig, LlamaForCausalLM, MarianConfig, MarianMTModel

from hf_scratch_transformer import ScratchDecoderForCausalLM
from tests import tiny, tiny_runs
from training import checkpoints, metrics, optimisation, sharding
from training.recipe import Checkpoints
from training.sections import RecipeError

ASKED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}  # what `accelerate launch --use_fsdp` sets
MESH = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}
OPTIONS = {
    "adamw": {"optimizer": "adamw", "final_weights": "ema", "ema_decay": 0.5},
    "muon": {"optimizer": "muon"},
    "masked": {"optimizer": "adamw", "final_weights": "mean", "mean_of": 2},
}
OBJECTIVES = {"adamw": "translation", "muon": "causal_lm", "masked": "masked_lm"}

# Both processes do all these runs: starting costs more than running.
PROGRAM = """
import os, sys
from pathlib import Path
import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor
from tests import tiny_runs
from training import loop, optimisation

class Killed(BaseException):
    pass

def dying(run, *group):
    if run.state.step == 4:
        raise Killed
    return honest(run, *group)

def looking(run, *group):
    norm = honest(run, *group)
    states = [entry for o in run.optimizers for state in o.state.values() for entry in state.values() if entry.ndim]
    for tensor in [*run.unwrapped_model.parameters(), *states]:
        assert isinstance(tensor, DTensor) and tensor.to_local().numel() < max(tensor.numel(), 2)
    return norm

Accelerator.end_training = lambda self: None  # which would end the process group with the first run
optimisation.multiplies_bfloat16 = lambda device: False
honest, folder = loop._step, Path(sys.argv[1])
for kind in ("adamw", "muon", "masked"):
    recipe = folder / kind / "recipe.yaml"
    loop._step = looking
    assert tiny_runs.run(recipe, folder / kind / "whole") == 0
    loop._step = dying
    try:
        tiny_runs.run(recipe, folder / kind / "killed")
        raise AssertionError
    except Killed:
        pass
    loop._step = honest
    assert tiny_runs.run(recipe, folder / kind / "killed", "--resume") == 0
sys.stdout.flush()
os._exit(0)  # as `python -m training` ends
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of two processes in folder/{adamw,muon}/{whole,killed}, and of one in folder/{adamw,muon}/one."""
    folder = tmp_path_factory.mktemp("sharding")
    (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimisation, "multiplies_bfloat16", lambda device: False)  # which would blur the last digits
        for kind, optimisation_options in OPTIONS.items():
            (folder / kind).mkdir()
            recipe = tiny_runs.write_recipe(
                folder / kind,
                OBJECTIVES[kind],
                model={"dropout": 0.0, "tie_word_embeddings": kind == "adamw", "use_qk_norm": kind != "adamw"},
                optimisation=optimisation_options | {"accumulation": 2, "max_steps": 6, "warmup_steps": 2},
                evaluation={"every_steps": 3},
                checkpoints={"every_steps": 2, "keep_last": 5},
            )
            assert tiny_runs.run(recipe, folder / kind / "one") == 0
    tiny_runs.fork(folder / "program.py", folder, **ASKED)
    return folder


HYBRID = """
import os, sys
from pathlib import Path
from accelerate import Accelerator
from torch.distributed.tensor import DTensor, Replicate, Shard
from tests import tiny_runs
from training import loop, optimisation

def looking(run, *group):
    norm = honest(run, *group)
    for tensor in run.unwrapped_model.parameters():
        assert isinstance(tensor, DTensor) and tensor.placements == (Replicate(), Shard(0))
    return norm

Accelerator.end_training = lambda self: None
optimisation.multiplies_bfloat16 = lambda device: False
honest, loop._step, folder = loop._step, looking, Path(sys.argv[1])
for kind in ("adamw", "muon", "masked"):
    assert tiny_runs.run(folder / kind / "recipe.yaml", folder / kind / "hybrid") == 0
sys.stdout.flush()
os._exit(0)
"""


FULL = """
import os, sys
from accelerate import Accelerator
from safetensors import SafetensorError
from tests import tiny_runs
from training import checkpoints

def full(*_):  # as safetensors says it
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

Accelerator.end_training = lambda self: None
if os.environ["RANK"] == "1":
    checkpoints.save_file = full
assert tiny_runs.run(sys.argv[1], sys.argv[2]) == 1
sys.stdout.flush()
os._exit(0)
"""

DRAWN = """
import os, sys
from types import SimpleNamespace
import torch
from transformers import (
    BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, MarianConfig, MarianMTModel, Qwen3Config,
    Qwen3ForCausalLM
)
import hf_scratch_transformer as ours
from training import sharding

sizes = dict(vocab_size=51, hidden_size=16, intermediate_size=32, num_attention_heads=2)
marian = dict(vocab_size=51, d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16, pad_token_id=0)
layers = dict(encoder_layers=1, decoder_layers=1)
families = {
    "encoder": (ours.ScratchEncoderForMaskedLM, ours.ScratchEncoderConfig(
        **sizes, num_hidden_layers=2, lm_head_transform=True, lm_head_bias=True, initialization="xavier_uniform",
        position_embedding_type="learned")),
    "decoder": (ours.ScratchDecoderForCausalLM, ours.ScratchDecoderConfig(
        **sizes, num_hidden_layers=2, initialization="normal_zero_output", tie_word_embeddings=False)),
    "seq2seq": (ours.ScratchSeq2SeqForConditionalGeneration, ours.ScratchSeq2SeqConfig(
        **sizes, **layers, position_embedding_type="sinusoidal")),
    "bert": (BertForMaskedLM, BertConfig(**sizes, num_hidden_layers=2)),
    "llama": (LlamaForCausalLM, LlamaConfig(**sizes, num_hidden_layers=2)),
    "tied": (LlamaForCausalLM, LlamaConfig(**sizes, num_hidden_layers=2, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**sizes, num_hidden_layers=2, num_key_value_heads=2, head_dim=8)),
    "marian": (MarianMTModel, MarianConfig(
        **marian, **layers, encoder_attention_heads=2, decoder_attention_heads=2)),
}


def compare(kind, config):
    torch.manual_seed(3)
    one, state = kind(config), torch.get_rng_state()
    torch.manual_seed(3)
    unfilled = sharding.Unfilled()
    with unfilled:
        two = kind(config)
    assert all(parameter.is_meta for parameter in two.parameters())
    assert torch.equal(state, torch.get_rng_state())
    process = SimpleNamespace(num_processes=2, device=torch.device("cpu"), mixed_precision="no")
    sharding.shard(two, SimpleNamespace(reshard_after_forward=True), process, unfilled)
    assert [name for name, _ in one.named_parameters()] == [name for name, _ in two.named_parameters()]
    for mine, sharded in ((one.state_dict(), two.state_dict()), (dict(one.named_buffers()), dict(two.named_buffers()))):
        assert mine.keys() == sharded.keys()
        for name in mine:
            assert torch.equal(mine[name], sharding.full_tensor(sharded[name])), name
    ids = {"input_ids": torch.randint(1, 51, (3, 7))}
    if config.is_encoder_decoder:
        ids["decoder_input_ids"] = torch.randint(0, 51, (3, 5))
    for model in (one, two):
        model.eval()
        model(**ids).logits.square().mean().backward()
    for (name, parameter), other in zip(one.named_parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, sharding.full_tensor(other.grad), atol=1e-6, rtol=1e-4, msg=name)


torch.distributed.init_process_group("gloo")
for family in sys.argv[1:]:
    compare(*families[family])
    print(f"{family} equal", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("fails", ["True", "os.environ['RANK'] == '1'"])
def test_a_program_of_several_processes_that_fails_says_so(fails, tmp_path):
    (tmp_path / "program.py").write_text(f"import os, sys\nif {fails}:\n    sys.exit('it failed')\n")
    with pytest.raises(AssertionError, match=r"exit codes \[.*1.*\]: (?s:.*)it failed"):
        tiny_runs.fork(tmp_path / "program.py")


@pytest.mark.slow
def test_two_copies_of_two_halves_give_the_losses_of_one(runs):
    """HSDP, and layers that are computed again."""
    (runs / "hybrid.py").write_text(HYBRID, encoding="utf-8")
    asked = ASKED | MESH | {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "FSDP_ACTIVATION_CHECKPOINTING": "true"}
    tiny_runs.fork(runs / "hybrid.py", runs, processes=4, **asked)
    for kind in OPTIONS:
        one, four = tiny_runs.losses(runs / kind / "one"), tiny_runs.losses(runs / kind / "hybrid")
        assert one.keys() == four.keys() and max(abs(one[step] - four[step]) for step in one) < 1e-5


HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
MARIAN = MarianConfig(vocab_size=9, d_model=8, encoder_layers=1, decoder_layers=1, pad_token_id=0, **HEADS)
GROUP = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}
TENSOR_PARALLEL = """
import os, sys
from pathlib import Path
from accelerate import Accelerator
from torch.distributed.tensor import DTensor
from tests import tiny_runs
from training import loop, optimisation

class Killed(BaseException):
    pass

def looking(run, *group):
    norm = honest(run, *group)
    for name, tensor in run.unwrapped_model.named_parameters():
        is_split = any(placement.is_shard() for placement in tensor.placements[-1:])
        assert is_split and tensor.device_mesh.mesh_dim_names[-1] == "tp" or "norm" in name or "bias" in name, name
    if run.state.step == 4 and run.folder.name.startswith("killed"):
        raise Killed
    return norm

Accelerator.end_training = lambda self: None
optimisation.multiplies_bfloat16 = lambda device: False
honest, loop._step, folder = loop._step, looking, Path(sys.argv[1])
for kind in ("adamw", "muon", "masked"):
    for output in sys.argv[2:]:
        try:
            assert tiny_runs.run(folder / kind / "recipe.yaml", folder / kind / output) == 0
        except Killed:
            loop._step = honest
            assert tiny_runs.run(folder / kind / "recipe.yaml", folder / kind / output, "--resume") == 0
        loop._step = looking
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize(
    ("outputs", "processes", "asked"),
    [
        (("group",), 2, GROUP),
        pytest.param(("whole_group", "killed_group"), 2, GROUP, marks=pytest.mark.slow),
        pytest.param(("groups",), 4, ASKED | GROUP | {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}, marks=pytest.mark.slow),
    ],
)
def test_processes_that_share_every_matrix_give_the_losses_of_one(outputs, processes, asked, runs):
    """Tensor parallelism, alone and beside FSDP2; a resumed run is bit-identical, and goes on as one process."""
    (runs / "group.py").write_text(TENSOR_PARALLEL, encoding="utf-8")
    tiny_runs.fork(runs / "group.py", runs, *outputs, processes=processes, **asked)
    for kind in OPTIONS:
        one, *others = (tiny_runs.losses(runs / kind / name) for name in ("one", *outputs))
        assert all(one.keys() == many.keys() for many in others)
        assert max(abs(one[step] - many[step]) for many in others for step in one) < 1e-5
        assert all(many == others[0] for many in others)
        first, last = (tiny_runs.weights(runs / kind / name) for name in (outputs[0], outputs[-1]))
        assert all(torch.equal(first[name], last[name]) for name in first)
        for event in ("evaluation", "test"):
            measured = [[line["loss"] for line in events(runs / kind / name, event)] for name in ("one", outputs[0])]
            assert measured[0] == pytest.approx(measured[1], abs=1e-5) and measured[0]
        files = sorted((runs / kind / outputs[0] / "checkpoints").glob("*/model-*"))
        assert len(files) >= processes and len(files) % processes == 0
        shutil.copytree(runs / kind / outputs[0], runs / kind / f"{outputs[0]}_alone")
        for step in (5, 6):
            shutil.rmtree(runs / kind / f"{outputs[0]}_alone" / "checkpoints" / f"step-{step:08d}", ignore_errors=True)
        assert tiny_runs.run(runs / kind / "recipe.yaml", runs / kind / f"{outputs[0]}_alone", "--resume") == 0
        alone = tiny_runs.losses(runs / kind / f"{outputs[0]}_alone")
        assert max(abs(one[step] - alone[step]) for step in one) < 1e-5


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: tiny.model(ScratchDecoderForCausalLM, position_embedding_type="relative_bias"),
            "position_embedding_type relative_bias: cannot be",
        ),
        (
            lambda: tiny.model(ScratchDecoderForCausalLM, use_qk_norm=True, qk_norm_across_heads=True),
            "qk_norm_across_heads True: cannot be",
        ),
        (
            lambda: tiny.model(ScratchDecoderForCausalLM, num_key_value_heads=1),
            "num_key_value_heads 1: cannot be",
        ),
        (
            lambda: tiny.model(ScratchDecoderForCausalLM, intermediate_size=17),
            "17 of model.layers.0.mlp.up_proj cannot",
        ),
        (lambda: MarianMTModel(MARIAN), "MarianMTModel declares no plan"),
    ],
)
def test_a_model_that_cannot_be_shared_out_is_refused(model, message):
    with pytest.raises(RecipeError, match=message):
        sharding.split(model(), SimpleNamespace(size=lambda: 2))


def test_weights_travel_rounded_and_stay_whole(runs, tmp_path):
    """bf16: between two processes as near to one as rounding lets it; what is saved is in single precision."""
    words = [runs / "adamw" / "recipe.yaml", "--optimisation.precision", "bf16", "--output_dir"]
    tiny_runs.launch("-m", "training", *words, tmp_path / "two", **ASKED)
    one, two = tiny_runs.losses(runs / "adamw" / "one"), tiny_runs.losses(tmp_path / "two")
    assert 1e-5 < max(abs(one[step] - two[step]) for step in one) < 0.03
    assert {tensor.dtype for tensor in tiny_runs.weights(tmp_path / "two").values()} == {torch.float32}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"FSDP_VERSION": "1"}, "give --fsdp_version 2"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "--fsdp_offload_params true"),
        (
            MESH | {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"},
            "_shard_size 2, --parallelism_config_tp_size 1 are for 4 processes, not 2",
        ),
        (MESH | {"PARALLELISM_CONFIG_TP_SIZE": "2"}, "_tp_size 2 are for 4 processes, not 2"),
        (MESH | {"PARALLELISM_CONFIG_CP_SIZE": "2"}, "--parallelism_config_cp_size 2: training has no such thing"),
    ],
)
def test_what_would_be_left_undone_is_refused(asked, message, monkeypatch):
    for name, value in (ASKED | asked).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match=message):
        sharding.plugin(SimpleNamespace(num_processes=2))
    assert sharding.plugin(SimpleNamespace(num_processes=1)) is None, "nobody to share with"


SPREAD = {
    "one": (1, {}),
    "DDP": (2, {}),
    "FSDP2": (2, ASKED),
    "HSDP, 2 x 1": (
        2,
        ASKED | MESH | {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "1"},
    ),
    "HSDP, 2 x 2": (4, ASKED | MESH | {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}),
    "tensor parallel, 1 x 2": (2, GROUP),
    "FSDP2 and tensor parallel, 2 x 2": (4, ASKED | MESH | GROUP),
}


@pytest.mark.slow
@pytest.mark.parametrize("objective", tiny_runs.OBJECTIVES)
def test_a_hundred_steps_are_the_same_however_they_are_spread(objective, tmp_path):
    """Among processes, and among the workers that make their batches; and resumed in the middle, by one process too."""
    recipe = tiny_runs.write_recipe(
        tmp_path,
        objective,
        model={"dropout": 0.0},
        optimisation={"max_steps": 100, "warmup_steps": 10, "learning_rate": 0.001, "optimizer": "adamw"},
        evaluation={"every_steps": None},
        checkpoints={"every_steps": 50, "keep_last": 2},
    )
    losses = {}
    for name, (processes, asked) in SPREAD.items():
        for workers in (0, 4):
            output = tmp_path / f"{name} {workers}"
            words = ["-m", "training", recipe, "--output_dir", output, "--data.workers", str(workers)]
            tiny_runs.launch(*words, processes=processes, **asked)
            losses[name, workers] = tiny_runs.losses(output)
    for kind, many in {"FSDP2": "FSDP2", "group": "tensor parallel, 1 x 2"}.items():
        for name, (processes, asked) in {f"{kind} again": SPREAD[many], f"{kind} by one": SPREAD["one"]}.items():
            shutil.copytree(tmp_path / f"{many} 0", tmp_path / name)
            shutil.rmtree(max((tmp_path / name / "checkpoints").iterdir()))
            words = ["-m", "training", recipe, "--output_dir", tmp_path / name, "--resume"]
            assert "resuming" in tiny_runs.launch(*words, processes=processes, **asked)
            losses[name, 0] = tiny_runs.losses(tmp_path / name)
    first = losses["one", 0]
    apart = {key: max(abs(first[step] - each[step]) for step in first) for key, each in losses.items()}
    print(objective, apart)
    assert len(first) == 100 and all(each.keys() == first.keys() for each in losses.values())
    assert losses["FSDP2 again", 0] == losses["FSDP2", 0] == losses["FSDP2", 4]
    assert losses["group again", 0] == losses["tensor parallel, 1 x 2", 0] == losses["tensor parallel, 1 x 2", 4]
    assert losses["one", 0] == losses["one", 4]
    assert max(apart.values()) < 1e-5


PEAK = """
import os, resource, sys
from accelerate import Accelerator
from tests import tiny_runs

Accelerator.end_training = lambda self: None
assert tiny_runs.run(sys.argv[1], sys.argv[2]) == 0
print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB", flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_half_of_a_large_model_takes_little_more_than_half_of_the_memory(tmp_path):
    """From the start to the saved model, 400 million parameters, single precision, AdamW."""
    large = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 16}
    recipe = tiny_runs.write_recipe(
        tmp_path,
        "causal_lm",
        model=large | {"dropout": 0.0},
        optimisation={"optimizer": "adamw", "max_steps": 2, "learning_rate": 1e-6},
        checkpoints={"every_steps": 1},
        evaluation={"every_steps": 1, "samples": 0},
    )
    (tmp_path / "program.py").write_text(PEAK, encoding="utf-8")
    peaks = {}
    for processes, asked in ((1, {}), (2, ASKED)):
        said = tiny_runs.launch(
            tmp_path / "program.py", recipe, tmp_path / f"{processes}", processes=processes, **asked
        )
        peaks[processes] = [int(peak) for peak in re.findall(r"peak (\d+) MiB", said)]
        assert len(peaks[processes]) == processes and re.search(r": (\d)\d\d,\d{3},\d{3} parameters", said)[1] == "4"
    print(peaks)
    one, two = tiny_runs.losses(tmp_path / "1"), tiny_runs.losses(tmp_path / "2")
    assert max(abs(one[step] - two[step]) for step in one) < 1e-4
    assert max(peaks[2]) <= 0.6 * peaks[1][0], peaks


def events(output: Path, event: str) -> list[dict]:
    return [line for line in metrics.read(output / "metrics.jsonl") if line["event"] == event]


@pytest.mark.parametrize("kind", OPTIONS)
def test_two_processes_with_half_of_the_weights_give_the_losses_of_one(kind, runs):
    one, two = tiny_runs.losses(runs / kind / "one"), tiny_runs.losses(runs / kind / "whole")
    assert one.keys() == two.keys() and len(one) == 6
    assert max(abs(one[step] - two[step]) for step in one) < 1e-5
    for event in ("evaluation", "test"):
        measured = [[line["loss"] for line in events(runs / kind / name, event)] for name in ("one", "whole")]
        assert measured[0] == pytest.approx(measured[1], abs=1e-5) and measured[0]


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_sharded_run_resumes_bit_for_bit(kind, runs):
    whole, killed = runs / kind / "whole", runs / kind / "killed"
    assert tiny_runs.losses(whole) == tiny_runs.losses(killed)
    one, other = tiny_runs.weights(whole), tiny_runs.weights(killed)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", OPTIONS)
def test_what_sharded_runs_write_is_what_one_process_writes(kind, runs):
    one, two = runs / kind / "one", runs / kind / "whole"
    assert {path.name for path in (one / "model").iterdir()} == {path.name for path in (two / "model").iterdir()}
    files = sorted(path.relative_to(one) for path in one.glob("**/*.safetensors"))
    assert len(files) > 3
    for file in files:
        mine, theirs = (checkpoints.read_tensors((run / file).parent, file.name) for run in (one, two))
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert theirs.shape(name) == mine[name].shape
            torch.testing.assert_close(mine[name], theirs[name], atol=1e-3, rtol=1e-3)
    AutoModel.from_pretrained(two / "model")


@pytest.mark.parametrize("kind", OPTIONS)
def test_each_process_writes_its_half_of_a_checkpoint(kind, runs):
    newest = checkpoints.Store(runs / kind / "whole" / "checkpoints", Checkpoints()).complete()[0]
    names = {path.name for path in newest.iterdir()}
    assert {f"{what}-0000{part}-of-00002.safetensors" for what in ("model", "optimizer") for part in (1, 2)} < names
    assert not {"model.safetensors", "optimizer.safetensors"} & names
    checkpoints.verify(newest)
    sizes = [path.stat().st_size for path in sorted(newest.glob("model-*"))]
    assert max(sizes) < 1.2 * min(sizes)


@pytest.mark.parametrize("damage", ["missing part", "flipped bit"])
def test_a_damaged_part_of_a_checkpoint_is_found(damage, runs, tmp_path):
    newest = checkpoints.Store(runs / "muon" / "whole" / "checkpoints", Checkpoints()).complete()[0]
    shutil.copytree(newest, tmp_path / newest.name)
    file = tmp_path / newest.name / "model-00002-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    if damage == "missing part":
        file.unlink()
    with pytest.raises(checkpoints.CheckpointError, match="model-00002-of-00002.safetensors is"):
        checkpoints.verify(tmp_path / newest.name)


STOPPED = """
import os, signal, sys
from accelerate import Accelerator
from tests import tiny_runs
from training import objectives

def stopped(self, *arguments):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGINT)
    return honest(self, *arguments)

Accelerator.end_training = lambda self: None
honest, recipe, output, *words = objectives.Translation.translate, *sys.argv[1:]
if not words:
    objectives.Translation.translate = stopped
assert tiny_runs.run(recipe, output, *words) == (0 if words else 130)
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.slow
def test_a_signal_to_one_process_ends_the_evaluation_of_all_which_is_then_made_first(tmp_path):
    """Sharded weights that are gathered for the first time while nothing is trained can be trained afterwards."""
    recipe = tiny_runs.write_recipe(tmp_path, optimisation={"max_steps": 8}, evaluation={"every_steps": 5})
    (tmp_path / "program.py").write_text(STOPPED, encoding="utf-8")
    for output, words in (("whole", ["--overwrite"]), ("stopped", []), ("stopped", ["--resume"])):
        said = tiny_runs.fork(tmp_path / "program.py", recipe, tmp_path / output, *words, **ASKED)
    assert "resuming" in said and "step-00000005-unmeasured" in said
    whole, stopped = tiny_runs.weights(tmp_path / "whole"), tiny_runs.weights(tmp_path / "stopped")
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)
    assert tiny_runs.losses(tmp_path / "whole") == tiny_runs.losses(tmp_path / "stopped")


def test_a_part_that_cannot_be_written_ends_the_run_of_all(runs, tmp_path):
    """And leaves nothing half-written."""
    program = tmp_path / "program.py"
    program.write_text(FULL, encoding="utf-8")
    said = tiny_runs.fork(program, runs / "muon" / "recipe.yaml", tmp_path / "run", **ASKED)
    assert said.count("the checkpoint cannot be saved: Error while serializing: I/O error: No space left") == 2
    assert said.count("there is none before it") == 2
    assert not [*(tmp_path / "run" / "checkpoints").iterdir()]


OURS = ("encoder", "decoder", "seq2seq")


@pytest.mark.parametrize(
    ("natives", "asked"),
    [pytest.param(("llama", "bert", "marian"), {}, marks=pytest.mark.slow), (("llama", "tied", "qwen3"), GROUP)],
)
def test_weights_that_are_drawn_where_they_lie_are_those_of_one_process(natives, asked, tmp_path):
    """And their gradients. Also what is tied across units that are sharded apart, as in BERT, is one; no process holds
    all of it."""
    program = tmp_path / "program.py"
    program.write_text(DRAWN, encoding="utf-8")
    said = tiny_runs.fork(program, *OURS, *natives, **asked)
    assert all(said.count(f"{family} equal") == 2 for family in (*OURS, *natives))  # lines of two may be one


EXACT = """
import sys
from training import optimisation
from training.__main__ import command

optimisation.multiplies_bfloat16 = lambda device: False
command(sys.argv[1:])
"""


@pytest.mark.parametrize("is_native", [pytest.param(False, marks=pytest.mark.slow), True])
def test_parts_of_a_model_that_exists_are_read_where_they_will_lie(is_native, runs, tmp_path, monkeypatch):
    """Ours, and a native one that is converted tensor by tensor."""
    monkeypatch.setattr(optimisation, "multiplies_bfloat16", lambda device: False)
    model, tree = runs / "muon" / "one" / "model", yaml.safe_load((runs / "muon" / "recipe.yaml").read_text())
    if is_native:
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
        tokenizer = AutoTokenizer.from_pretrained(model)
        LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path / "native")
        model = tmp_path / "native"
        ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
        tree["tokenizer"] = {"path": str(runs / "muon" / "one" / "model")}
    else:
        ids = {}
        del tree["tokenizer"]
    tree["model"] = {"path": str(model), **ids}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert tiny_runs.run(tmp_path / "recipe.yaml", tmp_path / "one") == 0
    (tmp_path / "program.py").write_text(EXACT, encoding="utf-8")
    words = [tmp_path / "program.py", tmp_path / "recipe.yaml", "--output_dir", tmp_path / "two"]
    tiny_runs.fork(*words, **ASKED)
    one, two = tiny_runs.losses(tmp_path / "one"), tiny_runs.losses(tmp_path / "two")
    assert one.keys() == two.keys() and max(abs(one[step] - two[step]) for step in one) < 1e-5
    newest = checkpoints.Store(tmp_path / "two" / "checkpoints", Checkpoints()).complete()[0]
    identities = [
        checkpoints.read_state(run / "checkpoints" / newest.name)["identity"]
        for run in (tmp_path / "one", newest.parents[1])
    ]
    assert identities[0] == identities[1] and identities[0]["base_model"]


@pytest.mark.parametrize("kind", OPTIONS)
def test_one_process_goes_on_from_the_checkpoint_of_two(kind, runs, tmp_path, monkeypatch):
    monkeypatch.setattr(optimisation, "multiplies_bfloat16", lambda device: False)
    shutil.copytree(runs / kind / "whole", tmp_path / "run")
    for step in (5, 6):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:08d}", ignore_errors=True)
    assert tiny_runs.run(runs / kind / "recipe.yaml", tmp_path / "run", "--resume") == 0
    one, resumed = tiny_runs.losses(runs / kind / "one"), tiny_runs.losses(tmp_path / "run")
    assert one.keys() == resumed.keys()
    assert max(abs(one[step] - resumed[step]) for step in one) < 1e-5
