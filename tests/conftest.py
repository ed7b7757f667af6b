"""What a shell starts in the background ignores SIGINT, and so would every process that tests start and interrupt.
Nothing is kept in the caches of whoever runs the tests."""

import atexit
import os
import shutil
import signal
import tempfile

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="hf-home-")  # before anything reads it
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
