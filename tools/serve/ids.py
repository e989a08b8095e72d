"""Ids of answers, requests, calls and items: random, so that nobody guesses another's."""

from __future__ import annotations

import os
import threading

#: Bytes that are asked for at once. Each time the system is asked the event loop gives the interpreter's lock away, and
#: gets it back from the worker's thread about half a millisecond later.
_AT_ONCE = 4096

_left, _lock = bytearray(), threading.Lock()


def new_id(prefix: str, n_bytes: int = 12) -> str:
    """The prefix, which ends in its own sign, and so many random bytes in hexadecimal digits."""
    with _lock:
        if len(_left) < n_bytes:
            _left[:] = os.urandom(_AT_ONCE)
        found = _left[-n_bytes:].hex()
        del _left[-n_bytes:]
    return prefix + found
