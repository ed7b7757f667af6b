"""Inference engines, ours among them, each in a process of its own that writes what it is asked for.

Those processes import this module: what not all of them need is imported where it is used.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

OURS = "generate"
Writer = Callable[[list[int], int], list[int]]  # a prompt, or a source, and how many tokens -> what is written


@dataclass(frozen=True)
class Settings:
    """What an engine has to be told of a model."""

    is_translator: bool
    start: int | None  # of a target
    ends: list[int]
    threads: int


@dataclass(frozen=True)
class Contender:
    """An engine at a precision: the package that runs it, how its files are written, and how they are run."""

    engine: str
    precision: str
    package: str
    module: str
    write: Callable[[Path, Path], None] | None  # model, new folder or file; none: it runs the model's own folder
    open: Callable[[Settings, Path], Writer]
    suffix: str = ""  # of a file


# --- Ours -----------------------------------------------------------------------------------------------------------


def open_ours(settings: Settings, place: Path, is_compiled: bool = False, is_quantized: bool = False) -> Writer:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.utils import logging

    import hf_scratch_transformer  # noqa: F401

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(settings.threads)
    auto_class = AutoModelForSeq2SeqLM if settings.is_translator else AutoModelForCausalLM
    model = auto_class.from_pretrained(place, dtype=torch.float32).eval()
    search: Callable[..., Any] = partial(model.generate, do_sample=False, num_beams=1)
    if is_quantized:
        torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True)
    if is_compiled:
        from hf_scratch_transformer.decoding import CompiledDecoding

        search = partial(CompiledDecoding().greedy, model)

    def write(prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        written = search(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count)
        tokens: list[int] = written[0, 1 if settings.is_translator else len(prompt) :].tolist()
        return tokens

    return write


def open_compiled(settings: Settings, place: Path) -> Writer:
    return open_ours(settings, place, is_compiled=True)


def open_quantized(settings: Settings, place: Path) -> Writer:
    return open_ours(settings, place, is_quantized=True)


# --- Others ---------------------------------------------------------------------------------------------------------


def write_ctranslate2(source: Path, place: Path, quantization: str | None = None) -> None:
    from ctranslate2.converters import TransformersConverter

    from hf_scratch_transformer.conversion import ctranslate2  # noqa: F401  (it teaches the converter)

    TransformersConverter(str(source)).convert(str(place), quantization=quantization)


def write_ctranslate2_int8(source: Path, place: Path) -> None:
    write_ctranslate2(source, place, "int8")


def open_ctranslate2(settings: Settings, place: Path) -> Writer:
    import ctranslate2

    model_class = ctranslate2.Translator if settings.is_translator else ctranslate2.Generator
    stored = "int8" if "int8" in place.name else "float32"
    engine = model_class(str(place), intra_threads=settings.threads, inter_threads=1, compute_type=stored)
    words = {name: json.loads(path.read_text()) for path in place.glob("*vocabulary.json") for name in [path.stem]}
    source = words.get("source_vocabulary") or next(iter(words.values()))
    target = {word: index for index, word in enumerate(words.get("target_vocabulary", source))}

    def write(prompt: list[int], count: int) -> list[int]:
        given = [[source[index] for index in prompt]]
        if settings.is_translator:
            written = engine.translate_batch(given, beam_size=1, max_decoding_length=count)[0].hypotheses[0]
        else:
            options = {"max_length": count, "sampling_topk": 1, "include_prompt_in_result": False}
            written = engine.generate_batch(given, **options)[0].sequences[0]
        return [target[word] for word in written]

    return write


def write_onnx(source: Path, place: Path) -> None:
    from hf_scratch_transformer.conversion.engines import export

    export(source, "onnx", place, verify=False)


def write_onnx_int8(source: Path, place: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic

    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        whole = Path(folder, "whole")
        write_onnx(source, whole)
        shutil.copytree(whole, place, ignore=shutil.ignore_patterns("*.onnx", "*.onnx.data", "*.onnx_data"))
        for file in whole.glob("*.onnx"):
            quantize_dynamic(file, place / file.name)


def open_onnx(settings: Settings, place: Path) -> Writer:
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = settings.threads
    sessions = {
        file.stem: onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        for file in place.glob("*.onnx")
    }
    names = {name: [each.name for each in session.get_outputs()] for name, session in sessions.items()}

    def run(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
        values = {
            key: value if isinstance(value, onnxruntime.OrtValue) else onnxruntime.OrtValue.ortvalue_from_numpy(value)
            for key, value in inputs.items()
        }
        outputs = sessions[name].run_with_ort_values(names[name], values)
        return dict(zip(names[name], outputs, strict=True))

    def best(outputs: dict[str, Any]) -> int:
        return int(outputs["logits"].numpy()[0, -1].argmax())

    def held(outputs: dict[str, Any]) -> dict[str, Any]:
        return {name.replace("present", "past_key_values"): each for name, each in outputs.items() if name != "logits"}

    def write(prompt: list[int], count: int) -> list[int]:
        ids = np.array([prompt])
        mask = np.ones_like(ids)
        if settings.is_translator:
            states = run("encoder_model", {"input_ids": ids, "attention_mask": mask})["last_hidden_state"]
            given = {"encoder_attention_mask": mask}
            start = np.array([[settings.start]])
            outputs = run("decoder_model", {"input_ids": start, "encoder_hidden_states": states, **given})
            after = "decoder_with_past_model"
        else:
            empty = {
                each.name: np.zeros((1, each.shape[1], 0, each.shape[3]), np.float32)
                for each in sessions["model"].get_inputs()
                if each.name.startswith("past_key_values")
            }
            outputs, after = run("model", {"input_ids": ids, "attention_mask": mask, **empty}), "model"
        cache, written = held(outputs), [best(outputs)]
        while len(written) < count and written[-1] not in settings.ends:
            if not settings.is_translator:
                given = {"attention_mask": np.ones((1, len(prompt) + len(written)), np.int64)}
            outputs = run(after, {"input_ids": np.array([[written[-1]]]), **given, **cache})
            cache |= held(outputs)
            written.append(best(outputs))
        return written

    return write


def write_gguf(source: Path, place: Path) -> None:
    from hf_scratch_transformer.conversion.engines import export

    export(source, "gguf", place, verify=False)


def write_gguf_int8(source: Path, place: Path) -> None:
    import llama_cpp

    _silent = llama_cpp.llama_log_callback(lambda *said: None)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        whole = Path(folder, "whole.gguf")
        write_gguf(source, whole)
        how = llama_cpp.llama_model_quantize_default_params()
        how.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
        llama_cpp.llama_log_set(_silent, None)
        if llama_cpp.llama_model_quantize(str(whole).encode(), str(place).encode(), how):
            raise ValueError("llama.cpp cannot quantise the file")


@contextlib.contextmanager
def weights_as_stored() -> Iterator[None]:
    """Within it, llama.cpp does not arrange weights anew for a processor with AMX, where its kernels for them end the
    process (llama-cpp-python 0.3.36: SIGSEGV in the first step of a file of 8 or 4 bits)."""
    import llama_cpp.llama_cpp as low

    default = low.llama_model_default_params

    def without() -> Any:
        params = default()
        params.use_extra_bufts = False
        return params

    described = Path("/proc/cpuinfo")
    if described.exists() and "amx_tile" in described.read_text():
        low.llama_model_default_params = without
    try:
        yield
    finally:
        low.llama_model_default_params = default


def open_gguf(settings: Settings, place: Path) -> Writer:
    import llama_cpp

    threads = dict.fromkeys(("n_threads", "n_threads_batch"), settings.threads)
    with weights_as_stored():
        engine = llama_cpp.Llama(str(place), n_ctx=0, verbose=False, **threads)

    def write(prompt: list[int], count: int) -> list[int]:
        engine.reset()  # else it would go on from what it holds of the same prompt
        written: list[int] = []
        for token in engine.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0):
            written.append(token)
            if len(written) == count or token in settings.ends:
                break
        return written

    return write


CONTENDERS = [
    Contender(OURS, "fp32", "torch", "torch", None, open_ours),
    Contender("greedy, compiled", "fp32", "torch", "torch", None, open_compiled),
    Contender(OURS, "int8", "torch", "torch", None, open_quantized),
    Contender("CTranslate2", "fp32", "ctranslate2", "ctranslate2", write_ctranslate2, open_ctranslate2),
    Contender("CTranslate2", "int8", "ctranslate2", "ctranslate2", write_ctranslate2_int8, open_ctranslate2),
    Contender("ONNX Runtime", "fp32", "onnxruntime", "onnxruntime", write_onnx, open_onnx),
    Contender("ONNX Runtime", "int8", "onnxruntime", "onnxruntime", write_onnx_int8, open_onnx),
    Contender("llama.cpp", "fp32", "llama-cpp-python", "llama_cpp", write_gguf, open_gguf, ".gguf"),
    Contender("llama.cpp", "int8", "llama-cpp-python", "llama_cpp", write_gguf_int8, open_gguf, ".gguf"),
]


# --- A process that is measured -------------------------------------------------------------------------------------


def serve(opener: Callable[[Settings, Path], Writer], place: Path, settings: Settings) -> None:
    """Answer, a line of JSON for a line of JSON, until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    before = time.perf_counter()
    write = opener(settings, place)
    print(json.dumps({"open_seconds": time.perf_counter() - before}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        written, seconds = [], []
        for prompt in asked["prompts"]:
            before = time.perf_counter()
            written.append(write(prompt, asked["count"]))
            seconds.append(time.perf_counter() - before)
        answer = {"written": written, "seconds": seconds, "bytes": resident_bytes()}
        print(json.dumps(answer), file=answers, flush=True)


def resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


class Running:
    """A contender in its process."""

    def __init__(self, contender: Contender, place: Path, settings: Settings):
        command = [sys.executable, "-c", "from benchmarks.engines import worker; worker()"]
        words = [contender.open.__name__, str(place), json.dumps(vars(settings))]
        environment = os.environ | {"OMP_NUM_THREADS": str(settings.threads), "TOKENIZERS_PARALLELISM": "false"}
        self.errors: Any = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the process)
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": self.errors,
            "text": True,
        }
        self.process: Any = subprocess.Popen([*command, *words], env=environment, **pipes)
        self.open_seconds = self.answer()["open_seconds"]

    def ask(self, prompts: list[list[int]], count: int) -> dict[str, Any]:
        print(json.dumps({"prompts": prompts, "count": count}), file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Raises ValueError with the last line, or the signal, of a process that has ended."""
        if line := self.process.stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            return answer
        code = self.process.wait()
        self.errors.seek(0)
        ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise ValueError((self.errors.read().strip().splitlines() or [ended])[-1])

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.errors.close()


def worker() -> None:
    """The process of a contender, by its command line."""
    name, place, settings = sys.argv[1:]
    serve(globals()[name], Path(place), Settings(**json.loads(settings)))
