"""transformers' test mixins, importable although the source distribution carries only the top folder of its tests.

What that folder imports from elsewhere in the tree is stood in for here, before it is imported:

- `exporters`, `generation`: mixins of further tests, which do not run. Empty classes.
- `distributed_testing_utils`, `utils.test_configuration_utils`: helpers, written anew.
- `pipelines`: what each pipeline's own test does once the mixin has loaded model and tokenizer, written anew
  in `pipeline_tasks.py`.
"""

import os
import pickle
import socket
import sys
import tempfile
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import transformers.utils
from torch import multiprocessing

PACKAGE = "transformers_tests"


def stand_in(name: str, **contents: Any) -> None:
    """Put the module `transformers_tests.<name>` and the packages above it into `sys.modules`."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        package = sys.modules.setdefault(f"{PACKAGE}.{'.'.join(parts[:depth])}", ModuleType(parts[depth - 1]))
        package.__path__ = []
    module = ModuleType(f"{PACKAGE}.{name}")
    vars(module).update(contents)
    sys.modules[module.__name__] = module


def start_ranks(function: Callable, args: tuple = (), nprocs: int = 2) -> None:
    """Call `function(rank, *args)` in `nprocs` new processes; an error in one of them is raised here."""
    # Forked from a server that has imported this module and done nothing else: much faster than new interpreters.
    # The call is pickled by hand, because what it refers to can be imported only after this module is.
    multiprocessing.set_forkserver_preload(["upstream"])
    call = pickle.dumps((function, args))
    multiprocessing.start_processes(_rank, args=(call,), nprocs=nprocs, start_method="forkserver")


def _rank(rank: int, call: bytes) -> None:
    function, args = pickle.loads(call)
    function(rank, *args)


def run_distributed(world_size: int) -> Callable:
    """A decorator: the call `function(*args)` becomes `function(rank, *args)` in each process of a new group."""

    def decorate(function: Callable) -> Callable:
        def run(*args: Any) -> None:
            with socket.socket() as probe:
                probe.bind(("localhost", 0))
                port = probe.getsockname()[1]
            start_ranks(_in_group, (world_size, port, function, args), world_size)

        return run

    return decorate


def _in_group(rank: int, world_size: int, port: int, function: Callable, args: tuple) -> None:
    environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in (environment | {"RANK": rank, "LOCAL_RANK": rank}).items()})
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()


# Values, none a default, of fields that every configuration has.
CONFIG_VALUES = {
    "return_dict": False,
    "output_hidden_states": True,
    "output_attentions": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 5,
    "architectures": ["SomeModel"],
    "id2label": {0: "yes", 1: "no", 2: "perhaps"},
    "label2id": {"yes": 0, "no": 1, "perhaps": 2},
    "problem_type": "regression",
    "name_or_path": "a/name",
}

stand_in("exporters.test_export", ExportTesterMixin=type("ExportTesterMixin", (), {}))
stand_in("generation.test_utils", GenerationTesterMixin=type("GenerationTesterMixin", (), {}))
stand_in("utils.test_configuration_utils", config_common_kwargs=CONFIG_VALUES)
stand_in(
    "distributed_testing_utils",
    run_distributed=run_distributed,
    _start_rank_processes=start_ranks,
    _get_distributed_backend=lambda: "gloo",
    _get_distributed_device_type=lambda: "cpu",
    _get_rank_device=lambda rank: torch.device("cpu"),
    _set_rank_device=lambda rank: None,
)

# Both would load a second copy of transformers from the source tree; the installed one has the same version.
transformers.utils.direct_transformers_import = lambda *args: transformers

# Where the pipeline tests find their models: `FamilyTest` fills it.
PIPELINE_MODELS = tempfile.TemporaryDirectory()
os.environ["TRANSFORMERS_TINY_MODEL_PATH"] = PIPELINE_MODELS.name
os.makedirs(os.path.join(PIPELINE_MODELS.name, "reports"))
with open(os.path.join(PIPELINE_MODELS.name, "reports", "tiny_model_summary.json"), "w") as file:
    file.write("{}")

from transformers_tests.test_configuration_common import ConfigTester  # noqa: E402, F401
from transformers_tests.test_fsdp_mixin import FSDP_DISTRIBUTED_TEST_MODEL_TYPES, FSDPTesterMixin  # noqa: E402, F401
from transformers_tests.test_modeling_common import (  # noqa: E402, F401
    ModelTesterMixin,
    ids_tensor,
    random_attention_mask,
)
from transformers_tests.test_pipeline_mixin import (  # noqa: E402, F401
    PipelineTesterMixin,
    pipeline_test_mapping,
    tiny_model_summary,
)
from transformers_tests.test_tensor_parallel_mixin import (  # noqa: E402, F401
    TP_DISTRIBUTED_TEST_MODEL_TYPES,
    TensorParallelTesterMixin,
)
from transformers_tests.test_training_mixin import TrainingTesterMixin  # noqa: E402, F401
