"""Settings of torch's libraries that they read from the environment once, when they are loaded or first used.

Whoever has set one of these keeps it. Where torch was imported before graphrt, its threads' waiting stays as it was.
"""

from __future__ import annotations

import os

#: Looks that a thread of GNU's OpenMP takes at what it waits for before it sleeps: about 30 us. Its default of 3 ms
#: takes the processor from the thread that is waited for when others keep the machine busy; none at all (what
#: OMP_WAIT_POLICY=passive says) makes each of a prompt's hundreds of products wait until a thread has woken up.
SPIN_COUNT = "GOMP_SPINCOUNT"
_SPINS = "2000"

#: Products that oneDNN, and torch's layer above it, keep prepared, each about 0.6 MB: one for every shape, hence for
#: every length of a prompt. Their default is 1024.
PREPARED_PRODUCTS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_PREPARED = "128"


def apply() -> None:
    """Sets what is not set, for this process and those that it starts."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(SPIN_COUNT, _SPINS)
    for name in PREPARED_PRODUCTS:
        os.environ.setdefault(name, _PREPARED)
