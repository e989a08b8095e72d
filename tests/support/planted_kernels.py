"""Small kernels, some of which do what they don't declare: what kernel_accesses.py finds, as one JSON object.

A program, for a process without TRITON_INTERPRET (see test_kernel_accesses.py).
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.launch import Launch
from support.aot import compiled
from support.kernel_accesses import differences

RIGHT = {"reads": "p_x p_w", "writes": "p_out", "early": "p_w"}


@triton.jit
def added(p_x, p_w, p_out, n, PDL: tl.constexpr):
    i = tl.arange(0, 128)
    w = tl.load(p_w + i, mask=i < n)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tl.store(p_out + i, w + tl.load(p_x + i, mask=i < n), mask=i < n)


@triton.jit
def one_branch_waits(p_x, p_w, p_out, n, PDL: tl.constexpr):
    i = tl.arange(0, 128)
    if n > 7:
        gdc_wait()
    tl.store(p_out + i, tl.load(p_w + i) + tl.load(p_x + i))


@triton.jit
def both_branches_wait(p_x, p_w, p_out, n, PDL: tl.constexpr):
    i = tl.arange(0, 128)
    w = tl.load(p_w + i)
    if n > 7:
        w += tl.load(p_w + 128 + i)
        gdc_wait()
    else:
        gdc_wait()
    tl.store(p_out + i, w + tl.load(p_x + i))


@triton.jit
def a_loop_waits(p_x, p_w, p_out, n, PDL: tl.constexpr):
    i = tl.arange(0, 128)
    p = p_w + i
    other = p_x + i
    total = tl.zeros([128], tl.float32)
    for _ in range(n):
        total += tl.load(p)
        gdc_wait()
        p, other = other, p  # the second turn reads x
    tl.store(p_out + i, total)


@triton.jit
def a_while_loop_waits_first(p_x, p_w, p_out, n, PDL: tl.constexpr):
    i = tl.arange(0, 128)
    w = tl.load(p_w + i)
    while n > 0:
        gdc_wait()
        tl.store(p_out + i, w + tl.load(p_x + i))
        n -= 128


@triton.jit
def lets_go_first(p_x, p_w, p_out, n, PDL: tl.constexpr):
    i = tl.arange(0, 128)
    gdc_launch_dependents()
    w = tl.load(p_w + i)
    gdc_wait()
    tl.store(p_out + i, w + tl.load(p_x + i))


@triton.jit
def never_waits(p_x, p_w, p_out, n, PDL: tl.constexpr):
    i = tl.arange(0, 128)
    tl.store(p_out + i, tl.load(p_w + i) + tl.load(p_x + i))


@triton.jit
def reads_by_hand(p_x, p_w, p_out, n, PDL: tl.constexpr):
    i = tl.arange(0, 128)
    p = tl.where(n > 3, p_x, p_w)
    x = tl.inline_asm_elementwise("ld.global.b32 $0, [$1];", "=r,l", [p], dtype=tl.float32, is_pure=False, pack=1)
    gdc_wait()
    tl.store(p_out + i, x + tl.load(p_w + i))


@triton.jit
def counts_early(p_x, p_w, p_out, n, PDL: tl.constexpr):
    i = tl.arange(0, 128)
    tl.atomic_add(p_out + i, tl.load(p_w + i, cache_modifier=".cg"))
    gdc_wait()
    tl.atomic_add(p_out + i, tl.load(p_x + i))


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "right": (added, RIGHT),
    "a pointer is missing": (added, {**RIGHT, "writes": ""}),
    "late, it says": (added, RIGHT | {"early": ""}),
    "never, it says": (added, RIGHT | {"early": "", "early_if": {"EARLY": "p_w"}}),
    "past the L1 cache, it says": (added, RIGHT | {"uncached": "p_w"}),
    "it reads, it says": (added, RIGHT | {"reads": "p_x p_w p_out", "writes": ""}),
    "it writes, it says": (added, RIGHT | {"reads": "p_w", "writes": "p_out p_x"}),
    "one branch waits": (one_branch_waits, RIGHT),
    "both branches wait": (both_branches_wait, RIGHT),
    "a loop waits": (a_loop_waits, RIGHT),
    "a loop waits first": (a_while_loop_waits_first, RIGHT),
    "lets go first": (lets_go_first, RIGHT),
    "lets go first and says so": (lets_go_first, RIGHT | {"lets_go_early": True}),
    "never waits": (never_waits, RIGHT),
    "reads by hand": (reads_by_hand, RIGHT),
    "counts early": (counts_early, RIGHT | {"reads": "p_x p_w p_out", "uncached": "p_w"}),
}


def main() -> None:
    x = torch.zeros(128)
    found = {}
    for name, (kernel, declared) in CASES.items():
        launch = Launch(accesses(**declared)(kernel), (1,), {"p_x": x, "p_w": x, "p_out": x, "n": 5, "PDL": True})
        launch.args["EARLY"] = False
        made = compiled(launch, "sm_90")
        found[name] = sorted(differences(launch, made.asm["ttgir"], made.asm["ptx"]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
