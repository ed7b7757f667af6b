"""What a run takes of many devices, by formulas, and the same formulas beside two processes on this machine.

    python -m benchmarks scale [--rounds 3] [--output_dir FOLDER]

Two processes on gloo train a small decoder in single precision, spread in each of the ways that training knows; the
folder receives `scale.json`: what each took of memory, of the network and of the disk, and what the formulas say.
`docs/SCALE.md` has both, and what the formulas say of GPUs.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from hf_scratch_transformer import ScratchDecoderConfig, ScratchDecoderForCausalLM
from hf_scratch_transformer.files import write_text
from training import loop, sharding
from training.recipe import parse
from training.roofline import SHEETS
from training.run import Run, open_accelerator, prepare, save
from training.sharding import Sizes

from .preparation import environment_of_this, write_corpus

# --- Formulas -------------------------------------------------------------------------------------------------------

STATE = 16  # bytes a parameter: weight, gradient and AdamW's two moments, in single precision
SAVED = 12  # of them what a checkpoint holds: not the gradient
FLOPS = 6  # a parameter and token: forward 2, backward 4 (Kaplan et al. 2020)


@dataclass(frozen=True)
class Model:
    """A decoder of ours: pre-norm, SwiGLU, rotary positions. Sizes by the names of its configuration."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int

    @property
    def fields(self) -> dict[str, Any]:
        """Of its configuration."""
        return {"hidden_act": "swiglu", "dropout": 0.0, "tie_word_embeddings": False, **vars(self)}

    def counted(self) -> tuple[int, int]:
        """Parameters in all, and of one block."""
        with torch.device("meta"):
            model = ScratchDecoderForCausalLM(ScratchDecoderConfig(**self.fields))
        block = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
        return sum(parameter.numel() for parameter in model.parameters()), block

    def activations(self, tp: int = 1) -> int:
        """Numbers that a block keeps of a token for its backward pass. Of width D: the inputs of both norms and of what
        follows each, queries, attention's output and the input of the last product; of keys and values as much as they
        are wide; of width F: both halves of SwiGLU, the activated one, their product. A tensor-parallel group shares
        what lies between the norms."""
        keys = self.hidden_size // self.num_attention_heads * self.num_key_value_heads
        between = 3 * self.hidden_size + 2 * keys + 4 * self.intermediate_size
        return 4 * self.hidden_size + between // tp


def memory(model: Model, spread: Sizes, tokens: int, width: int, checkpointing: bool = False) -> dict[str, float]:
    """Bytes of a process while it trains.

    Args:
        tokens: of its batch.
        width: bytes of a number that is computed with: 2 in bf16, 4 in single precision.
        checkpointing: whether blocks are computed again in the backward pass, of which then only inputs are kept.
    """
    every, block = model.counted()
    rest = every - block * model.num_hidden_layers
    layers = model.num_hidden_layers * (model.hidden_size if checkpointing else model.activations(spread.tp))
    again = model.activations(spread.tp) if checkpointing else 0
    # Gathered: what is in no block, all the time, and its gradients; two blocks, one of them ahead, and the gradients
    # of one, as they are computed and in single precision.
    gathered = (width * (2 * rest + 3 * block) + 4 * block) / spread.tp if spread.dp_shard > 1 else 0
    kept, gradients = float(width * tokens * (layers + again)), (STATE - SAVED) * every / spread.parts
    if spread.parts > 1 or spread.dp_replicate == 1:
        gradients = max(gradients - kept, 0)  # they grow as activations go; the buckets of DDP are always there
    return {"states": SAVED * every / spread.parts, "gradients": gradients, "gathered": gathered, "activations": kept}


def network(model: Model, spread: Sizes, tokens: int, width: int, is_gloo: bool = False) -> dict[str, float]:
    """Bytes that a process sends in a step, by ring algorithms, of which each also receives as many; gloo scatters sums
    by summing everything in every process."""
    every, block = model.counted()
    blocks = block * model.num_hidden_layers
    shard, copies, tp = spread.dp_shard, spread.dp_replicate, spread.tp
    # Blocks are gathered forward and again backward, the rest once; gradients travel in single precision.
    gathered = width * (every + blocks) / tp * (shard - 1) / shard
    scattered = 4 * every / tp * (shard - 1) / shard * (2 if is_gloo else 1)
    reduced = 4 * every / spread.parts * 2 * (copies - 1) / copies
    # Forward a sum after attention and one after the feed-forward layer, backward one before each; and the embedding's,
    # the head's input's. The logits are put together.
    sums = (4 * model.num_hidden_layers + 2) * model.hidden_size * 2 * (tp - 1) / tp
    logits = model.vocab_size * (tp - 1) / tp
    return {
        "gathered": gathered,
        "scattered": scattered,
        "reduced": reduced,
        "tensor parallel": width * tokens * (sums + logits) if tp > 1 else 0.0,
    }


def checkpoint(model: Model, spread: Sizes) -> float:
    """Bytes that each process of one copy writes."""
    return SAVED * model.counted()[0] / spread.parts


# --- GPUs -----------------------------------------------------------------------------------------------------------

MODELS = {
    "0.1 billion": Model(768, 2048, 12, 12, 12, 32_000),
    "1 billion": Model(2048, 5632, 22, 32, 4, 32_000),
    "7 billion": Model(4096, 11_008, 32, 32, 32, 32_000),
}
GPUS, NODE = (8, 64, 512), 8
GPU, USED, ROOM = "H100", 0.4, 70e9  # assumed share of the data sheet's products (HFU); bytes that a run may fill
NVLINK, BETWEEN = 450e9, 50e9  # bytes a second that a GPU sends to others of its node, and to other nodes
DISK = 2e9  # bytes a second that a node writes
TOKENS = 16_384  # of a GPU and step


def on_gpus(writing: float) -> list[list[str]]:
    """Rows of a table: each model on each number of GPUs, a copy on each node (HSDP), in bf16.

    Args:
        writing: bytes a second that a process writes, flushes, and reads back and sums, as measured here.
    """
    rows = []
    for name, model in MODELS.items():
        every, _ = model.counted()
        for count in GPUS:
            spread = Sizes(count // NODE, NODE)
            kept = sum(memory(model, spread, TOKENS, 2).values())
            checkpointing = kept > ROOM
            taken = memory(model, spread, TOKENS, 2, checkpointing)
            sent = network(model, spread, TOKENS, 2)
            inside, between = sent["gathered"] + sent["scattered"], sent["reduced"]
            computing = FLOPS * every * TOKENS * (4 / 3 if checkpointing else 1) / (USED * SHEETS[GPU])
            saved = checkpoint(model, spread)
            seconds = max(saved * NODE / DISK, saved / writing)
            rate = count * TOKENS / computing
            rows.append(
                [
                    f"{name} ({every / 1e9:.2f})",
                    f"{count}",
                    f"{sum(taken.values()) / 1e9:.1f}, of it {taken['states'] / 1e9:.1f}"
                    + (f" (with all activations {kept / 1e9:.1f})" if checkpointing else ""),
                    f"{computing:.2f}",
                    f"{inside / 1e9:.2f} in {inside / NVLINK:.3f} s",
                    f"{between / 1e9:.2f} in {between / BETWEEN:.3f} s",
                    f"{saved / 1e9:.2f} in {seconds:.1f} s",
                    f"{rate / 1e6:,.2f} M, {2 * rate / count * NODE / 1e6:,.2f} MB/s a node",
                ]
            )
    return rows


HEAD = [
    "parameters",
    "GPUs",
    "memory of a GPU, GB, of it states",
    "a step, s",
    "sent in the node, GB a GPU",
    "sent to other nodes, GB a GPU",
    "checkpoint, GB a process",
    "tokens a second, and read",
]

# --- Two processes --------------------------------------------------------------------------------------------------

MEASURED = Model(768, 2048, 16, 12, 12, 300)
NEGLIGIBLE = Model(24, 32, 1, 12, 12, 300)  # what Python, torch and the connections take is measured with it
BATCH, WARMUP, STEPS = 256, 2, 3
MESH = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
WAYS: dict[str, tuple[Sizes, dict[str, str]]] = {
    "one process": (Sizes(), {}),
    "DDP, two copies": (Sizes(2), {}),
    "FSDP2, two parts": (Sizes(1, 2), {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}),
    "tensor parallel, two parts": (Sizes(tp=2), MESH | {"PARALLELISM_CONFIG_TP_SIZE": "2"}),
}


def main(argv: Sequence[str]) -> None:
    """Measure, print and write. Raises ValueError for what the command line cannot say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks scale", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way, of which medians count (%(default)s)")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/benchmark"), help="(%(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        raise ValueError(f"--rounds {arguments.rounds} must be at least 1")
    record: dict[str, Any] = {"environment": environment_of_this(), "tokens": BATCH, "model": vars(MEASURED)}
    record["parameters"] = MEASURED.counted()[0]
    with tempfile.TemporaryDirectory() as folder:
        record["ways"] = measured(Path(folder), arguments.rounds)
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    write_text(arguments.output_dir / "scale.json", json.dumps(record, indent=1) + "\n")
    for row in beside(record):
        print("  ".join(f"{cell:28}" for cell in row))


def measured(folder: Path, rounds: int) -> dict[str, dict[str, Any]]:
    """What each way takes, by what is measured: the median over rounds, and what the formulas say."""
    write_corpus(folder / "corpus", 100_000, 1)
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, (spread, asked) in WAYS.items():
            large, small = (launched(folder, model, spread, asked) for model in (MEASURED, NEGLIGIBLE))
            large["memory"] -= small["memory"]
            taken[name].append(large)
    result = {}
    for name, (spread, _) in WAYS.items():
        found = {what: statistics.median(each[what] for each in taken[name]) for what in taken[name][0]}
        sent = network(MEASURED, spread, BATCH, 4, is_gloo=True)
        formulas = {
            "memory": sum(memory(MEASURED, spread, BATCH, 4).values()),
            "network": sum(sent.values()),
            "checkpoint": checkpoint(MEASURED, spread),
        }
        result[name] = {"measured": found, "formula": formulas, "rounds": taken[name]}
    return result


def beside(record: dict[str, Any]) -> list[list[str]]:
    """Rows of a table: measured, by formula, and their ratio."""
    rows = []
    titles = {"memory": "memory", "network": "sent in a step", "checkpoint": "a checkpoint's part"}
    for name, way in record["ways"].items():
        for what, title in titles.items():
            found, said = way["measured"][what], way["formula"][what]
            if said:
                rows.append([name, title, f"{found / 1e6:,.1f} MB", f"{said / 1e6:,.1f} MB", f"{found / said:.3f}"])
    return rows


def writing(record: dict[str, Any]) -> float:
    """Bytes a second that a process of two wrote, flushed, read back and summed."""
    way = record["ways"]["FSDP2, two parts"]["measured"]
    return float(way["checkpoint"] / way["checkpoint_seconds"])


def launched(folder: Path, model: Model, spread: Sizes, asked: dict[str, str]) -> dict[str, float]:
    """What a process took of all that train a model spread so: the mean over them."""
    recipe = {
        "objective": "causal_lm",
        "data": {"path": str(folder / "corpus"), "window": BATCH, "batch_tokens": BATCH + 1},
        "tokenizer": {"vocab_size": model.vocab_size},
        "model": {"model_type": "scratch_decoder", **{k: v for k, v in model.fields.items() if k != "vocab_size"}},
        "optimisation": {"max_steps": WARMUP + STEPS, "optimizer": "adamw", "precision": "fp32"},
        "checkpoints": {"background": False},
        "output_dir": str(folder / "run"),
    }
    shutil.rmtree(folder / "run", ignore_errors=True)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    processes = spread.parts * spread.dp_replicate
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), "-m", __name__, str(path)]
    # What tensors take, and not what glibc keeps of what they have taken.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(sharding.LARGE)} | asked
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(found) != processes:
        raise ValueError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-5000:]}")
    return {name: statistics.mean(each[name] for each in found) for name in found[0]}


def work(recipe: str) -> None:
    """Be one of the processes: train a few steps, save, and print what that took."""
    parsed = parse([recipe])
    accelerator, folder = open_accelerator(parsed), Path(parsed.output_dir)
    run = prepare(parsed, accelerator, folder, time.monotonic())
    steps = loop.timed(run, WARMUP + STEPS)
    for _ in range(WARMUP):
        next(steps)
    before = _sent(run)
    seconds = [next(steps)[0] for _ in range(STEPS)]
    sent = (_sent(run) - before) / STEPS / accelerator.num_processes
    taken = _most()
    accelerator.wait_for_everyone()
    began = time.monotonic()
    save(run)
    run.store.wait()
    took = time.monotonic() - began
    accelerator.wait_for_everyone()
    size = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    part = size / (accelerator.num_processes if run.is_sharded else 1)
    found = {"memory": taken, "network": sent, "checkpoint": part, "checkpoint_seconds": took}
    # In one piece, since others print as well.
    sys.stdout.write(json.dumps(found | {"step_seconds": statistics.median(seconds)}) + "\n")
    sys.stdout.flush()
    accelerator.wait_for_everyone()
    os._exit(0)


def _sent(run: Run) -> int:
    """Bytes that have gone through the loopback device, once all processes are here."""
    run.accelerator.wait_for_everyone()
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    sent = next(int(line.split()[9]) for line in lines if line.split()[0] == "lo:")
    run.accelerator.wait_for_everyone()
    return sent


def _most() -> int:
    """Bytes of main memory that this process has held at once."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    work(sys.argv[1])
