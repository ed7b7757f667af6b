"""The launcher that started this process: with its death the process ends, and what it starts again goes on."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil
from accelerate.utils import InitProcessGroupKwargs
from torch.distributed import PrefixStore, Store, register_rendezvous_handler, rendezvous

from . import PARENT

# Variables that launchers set for the processes they start.
VARIABLES = {"TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"}
PAUSE = 0.2  # seconds

# Set while somebody asks `is_gone` now and then, and ends in good order.
attended = threading.Event()


def is_gone() -> bool:
    """Whether there was one, and it is no longer there."""
    return bool(VARIABLES & os.environ.keys()) and os.getppid() != PARENT


def has_written(path: Path) -> bool:
    """Whether a file is younger than the launcher, if that starts processes again (`torchrun --max-restarts`): then one
    of them has written it before, if none but its own may write there."""
    with suppress(OSError, psutil.Error):
        return "TORCHELASTIC_RUN_ID" in os.environ and path.stat().st_mtime > psutil.Process(PARENT).create_time()
    return False


@cache
def meeting() -> InitProcessGroupKwargs:
    """For `Accelerator`: where the processes find each other.

    What torchrun starts again would find the addresses of those before it, which are left in its store (seen with torch
    2.13; issues 135712 and 167288 of PyTorch). On several machines, whose restarts are counted apart, it is for the
    user to set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return InitProcessGroupKwargs()

    def apart(_: str, **options: Any) -> Iterator[tuple[Store, int, int]]:
        store, rank, size = next(rendezvous("env://", **options))
        yield PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store), rank, size

    register_rendezvous_handler("apart", apart)
    return InitProcessGroupKwargs(init_method="apart://")


def follow() -> None:
    """From now on, end with it at once where nobody attends to it.

    A process that is about to meet the others at an address would stay for half an hour, and be met there by those of
    the next run.
    """

    def watch() -> None:
        while attended.is_set() or not is_gone():
            time.sleep(PAUSE)
        os._exit(128 + signal.SIGTERM)

    if VARIABLES & os.environ.keys():
        threading.Thread(target=watch, name="launcher", daemon=True).start()
