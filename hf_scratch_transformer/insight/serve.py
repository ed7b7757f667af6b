"""`scratch-transformer serve FOLDER...`: the page of `insight.page`, on this machine alone unless asked otherwise.

Gradio and matplotlib are imported once the page is asked for: the other commands need neither.
"""

import argparse
import socket
import time
from contextlib import suppress
from typing import Any


def add_commands(subparsers: Any) -> None:
    """Add `serve`."""
    text = "a page in the browser: type a sentence, and see what models make of it"
    parser = subparsers.add_parser("serve", help=text, description=text)
    parser.add_argument("folders", metavar="FOLDER", nargs="+", help="a folder written by save_pretrained, or a Hub id")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all (%(default)s)")
    parser.add_argument("--port", type=int, default=7860, help="from 1 to 65535 (%(default)s)")
    parser.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> None:
    """Until Ctrl+C. An address that cannot be had is refused before models are loaded."""
    host, port = arguments.host, arguments.port
    if not 1 <= port <= 65535:
        raise ValueError(f"--port {port} must be from 1 to 65535")
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise ValueError(f"--host {host} --port {port}: {error.strerror}; give another") from error
    try:
        from . import page, streaming
    except ModuleNotFoundError as error:
        if error.name not in ("gradio", "matplotlib"):
            raise
        raise ValueError(f"serve needs {error.name}: pip install 'hf-scratch-transformer[serve]'") from error
    blocks = page.build(arguments.folders)
    # Nothing typed is kept, not even in the browser.
    options = {"share": False, "run_history": False, "footer_links": [], "quiet": True}
    _, url, _ = blocks.launch(server_name=host, server_port=port, prevent_thread_lock=True, **options)
    print(f"open {url} in a browser; Ctrl+C ends it", flush=True)
    with suppress(KeyboardInterrupt):
        while blocks.is_running:
            time.sleep(0.1)
    streaming.stop_all()
    time.sleep(0.5)  # in which their ends reach the browsers, whose connections close
    blocks.close(verbose=False)
