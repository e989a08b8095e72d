"""While a command starts, Python looks for cycles of garbage less often.

It looks each time when there are 700 more objects than before, now and then through all there are. Importing torch
makes half a million that stay: looking through them takes a tenth of the time to a first token and finds nothing.
"""

from __future__ import annotations

import gc

#: How many objects more, then as gc.set_threshold() has it.
_STARTING = (50_000, 20, 100)
_usual: list[tuple[int, int, int]] = []


def begin() -> None:
    """For a process's own command line, before anything large is imported."""
    _usual[:] = [gc.get_threshold()]
    gc.set_threshold(*_STARTING)


def done() -> None:
    """As usual from now on, but for what is here already, which is not looked through again. Without begin() it does
    nothing: a library leaves this to whoever imports it."""
    if _usual:
        gc.freeze()
        gc.set_threshold(*_usual.pop())
