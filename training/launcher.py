"""The launcher that started this process, with whose death it ends: what waits for other processes would wait on."""

import os
import signal
import threading
import time

from . import PARENT

# Variables that launchers set for the processes they start.
VARIABLES = {"TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"}
PAUSE = 0.2  # seconds

# Set while somebody asks `is_gone` now and then, and ends in good order.
attended = threading.Event()


def is_gone() -> bool:
    """Whether there was one, and it is no longer there."""
    return bool(VARIABLES & os.environ.keys()) and os.getppid() != PARENT


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
