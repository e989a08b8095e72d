"""Small cases that reach every kernel of FLASH_ATTN_EXT on a GPU, for NVIDIA's compute-sanitizer:

    compute-sanitizer --tool memcheck python -m graphrt test -b triton --cases tests.support.sanitizer_cases -j 0
    compute-sanitizer --tool racecheck python -m graphrt test -b triton --cases tests.support.sanitizer_cases -j 0

Not a test by itself: it needs that tool and a GPU, and takes a minute. -p picks some, by their parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from graphrt.ops.cases.flash_attn_axes import Axes, as_case
from graphrt.testing import Case

_BASE = Axes()
_Q8, _Q4 = ("q8_0", "q8_0"), ("q4_0", "q4_0")


def _axes() -> Iterator[Axes]:
    # Any GPU: the portable kernel and its fixup, decode and prefill forms.
    for d in ((40, 40), (192, 128)):
        yield replace(_BASE, d=d, n_q=1, n_kv=1025, mask="random")
        yield replace(_BASE, d=d, n_q=33, n_kv=257, mask="window", sinks="near")
    yield replace(_BASE, d=(96, 128), types=("q5_1", "iq4_nl"), n_q=9, n_kv=300)
    # The decode kernel: parts joined in place, and with the fixup.
    for d, heads in (((64, 64), (8, 1)), ((128, 128), (8, 2)), ((256, 256), (16, 1))):
        yield replace(_BASE, d=d, heads=heads, n_q=1, n_kv=2049, mask="window", sinks="near")
    for types in (_Q8, _Q4):
        yield replace(_BASE, d=(128, 128), heads=(4, 1), types=types, n_q=1, n_kv=1025, mask="lengths", n_seq=3)
    # Hopper's prefill kernels.
    for d in ((64, 64), (128, 128), (256, 256)):
        yield replace(_BASE, d=d, heads=(4, 2), n_q=130, n_kv=513, mask="causal", sinks="near")
    yield replace(_BASE, d=(128, 128), heads=(4, 2), n_q=130, n_kv=300, mask=None, softcap=5.0)
    yield replace(_BASE, d=(128, 128), heads=(4, 2), types=_Q8, n_q=130, n_kv=300, mask="random")
    yield replace(_BASE, d=(64, 64), heads=(4, 2), types=_Q4, n_q=130, n_kv=300, mask="causal")
    # MLA: many queries, and few whose keys are shared out.
    for n_q, n_kv in ((65, 300), (1, 2049)):
        yield replace(_BASE, d=(576, 512), heads=(16, 1), layout="v_in_k", n_q=n_q, n_kv=n_kv, mask="causal")


def cases() -> Iterator[Case]:
    yield from (as_case("FLASH_ATTN_EXT", axes) for axes in _axes())
