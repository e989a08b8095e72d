"""The list of this backend's fusions: small, named, and they can be switched off.

Each is a row beside the kernel that serves it: what finds its nodes and names them (in a file called *fusions.py), and
what lowers them.

GRAPHRT_FUSE=0 switches all off; a list of names with commas (GRAPHRT_FUSE=norm_mul,matmul_add) leaves only those on.
In it `all` stands for what is on unasked: GRAPHRT_FUSE=all,block_append.
"""

from __future__ import annotations

from graphrt.backends.triton.kernels.backward.glu import GLU_BACK
from graphrt.backends.triton.kernels.backward.steps import ADAMW_STEP
from graphrt.backends.triton.kernels.elementwise import SOFTCAP
from graphrt.backends.triton.kernels.experts.lower import EXPERT_GATE_UP, EXPERT_SUM
from graphrt.backends.triton.kernels.experts.route import EXPERT_ROUTING
from graphrt.backends.triton.kernels.flash_attn.launcher import (
    ATTENTION_BACK,
    ATTENTION_LSE,
    BLOCK_APPEND,
    LONG_BLOCK_APPEND,
    PANEL_APPEND,
)
from graphrt.backends.triton.kernels.latent import HEAD_PRODUCTS, LATENT_ROPE_CACHE
from graphrt.backends.triton.kernels.planned_norms import ADD_NORM, JOINED, NORM_MUL, NORM_MUL_ADD_NORM
from graphrt.backends.triton.kernels.products.adapters import ADAPTERS
from graphrt.backends.triton.kernels.products.lower import GATE_UP_GLU, MATMUL_ADD, OUT_PROD_ADD, PROJECTIONS
from graphrt.backends.triton.kernels.products.rotated import ROTATED_PROJECTIONS
from graphrt.backends.triton.kernels.products.trained import GRADIENT_OF_X, TRAINED_PRODUCTS
from graphrt.backends.triton.kernels.rope import NORM_ROPE_CACHE, ROPE_CACHE, ROPE_CACHE_ATTENTION
from graphrt.env import FUSE
from graphrt.errors import BackendError
from graphrt.fusion import Fusion

#: In the order in which they are tried: a node belongs to the first group that takes it.
FUSIONS: tuple[Fusion, ...] = (
    ROPE_CACHE_ATTENTION,
    BLOCK_APPEND,
    EXPERT_ROUTING,
    EXPERT_GATE_UP,
    EXPERT_SUM,
    LATENT_ROPE_CACHE,
    HEAD_PRODUCTS,
    ADAPTERS,
    TRAINED_PRODUCTS,
    GRADIENT_OF_X,
    GATE_UP_GLU,
    LONG_BLOCK_APPEND,
    ROTATED_PROJECTIONS,
    PROJECTIONS,
    NORM_ROPE_CACHE,
    JOINED,
    NORM_MUL_ADD_NORM,
    ADD_NORM,
    NORM_MUL,
    MATMUL_ADD,
    OUT_PROD_ADD,
    ROPE_CACHE,
    SOFTCAP,
    ATTENTION_LSE,
    PANEL_APPEND,
    ATTENTION_BACK,
    GLU_BACK,
    ADAMW_STEP,
)
#: Off unless GRAPHRT_FUSE names them: each loses at some of the lengths at which it was timed (BENCHMARKS.md).
ASKED_FOR: tuple[Fusion, ...] = (ROPE_CACHE_ATTENTION, BLOCK_APPEND, PANEL_APPEND)
#: Those that were timed on one architecture alone, where they are on.
TIMED_ON = {LONG_BLOCK_APPEND: "sm_90"}


def fusions_for(exact: bool, arch: str) -> list[Fusion]:
    """wanted_fusions() less what was timed on other architectures alone."""
    return [fusion for fusion in wanted_fusions(exact) if TIMED_ON.get(fusion, arch) == arch]


def wanted_fusions(exact: bool) -> list[Fusion]:
    """Those of FUSIONS that GRAPHRT_FUSE leaves on; if exact, those that change no bit, all of them. Raises
    BackendError for a name that is none of theirs."""
    if exact:
        return [fusion for fusion in FUSIONS if fusion.exact]
    text = (FUSE.get() or "").strip() or "1"
    known = [fusion.name for fusion in FUSIONS]
    names = {"0": [], "1": ["all"]}.get(text, [name.strip() for name in text.split(",")])
    unknown = [name for name in names if name not in known and name != "all"]
    if unknown:
        raise BackendError(f"GRAPHRT_FUSE must be 0, 1, all or names of {', '.join(known)}, got {unknown[0]!r}")
    if "all" in names:
        names += [fusion.name for fusion in FUSIONS if fusion not in ASKED_FOR]
    return [fusion for fusion in FUSIONS if fusion.name in names]


def asked_for(exact: bool) -> frozenset[str]:
    """The names of ASKED_FOR that GRAPHRT_FUSE has."""
    return frozenset(fusion.name for fusion in wanted_fusions(exact) if fusion in ASKED_FOR)
