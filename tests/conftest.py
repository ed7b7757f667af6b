"""What a shell starts in the background ignores SIGINT, and so would every process that tests start and interrupt."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
