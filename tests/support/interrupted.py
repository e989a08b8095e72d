"""`python interrupted.py N ARGUMENTS...`: graphrt's command line, with Ctrl-C at the N-th import that it makes.

What this prints last on stderr, if the run comes to its end, is how many imports there were.
"""

from __future__ import annotations

import os
import signal
import sys

from graphrt.__main__ import main

made, at = 0, int(sys.argv.pop(1))


def count(event: str, args: object) -> None:
    global made
    if event == "import":
        made += 1
        if made == at:
            os.kill(os.getpid(), signal.SIGINT)


signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
sys.addaudithook(count)
code = main()
if code == 0:
    print(f"{made} imports", file=sys.stderr)
sys.exit(code)
