"""Ctrl-C on the command line: one line and exit code 130, whatever is going on."""

import contextlib
import os
import signal
import sys
from types import FrameType

#: The exit code that shells give to what Ctrl-C ended.
EXIT_CODE = 130
_IMPORTING = "<frozen importlib._bootstrap>"


def install() -> None:
    """From now on Ctrl-C during an import ends the process at once, and raises KeyboardInterrupt elsewhere.

    A KeyboardInterrupt inside an import may be swallowed by what is imported, which then goes on in a wrong state.
    Where Ctrl-C is ignored (nohup) it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)


def finish() -> None:
    """The work is done: while Python shuts down, Ctrl-C ends the process without a word."""
    if signal.getsignal(signal.SIGINT) is _interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def line(who: str) -> str:
    """What is said of Ctrl-C. On a terminal it stands below what was being written, with the cursor shown."""
    return ("\x1b[?25h\n" if os.isatty(2) else "") + f"{who}: interrupted"


def command_name(args: list[str]) -> str:
    """ "graphrt run" of run's arguments."""
    return " ".join(["graphrt", *args[:1]])


def _interrupted(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            with contextlib.suppress(OSError):  # stderr may be closed
                os.write(2, f"{line(command_name(sys.argv[1:]))}\n".encode("utf-8", "backslashreplace"))
            os._exit(EXIT_CODE)
        frame = frame.f_back
    raise KeyboardInterrupt
