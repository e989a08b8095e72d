"""The graph that measures a shape, and its random inputs: several nodes, as the layers of a model have them.

Each node has q, k and v of its own; the mask and the sinks are shared. Together the caches of a decode graph are larger
than the device's cache by far, so that each run reads memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from graphrt import ops
from graphrt.dtypes import DType, dtype
from graphrt.execute import Executable
from graphrt.graph import Graph
from graphrt.host import host_type
from graphrt.models.attention import AttentionParams, standard_attention
from graphrt.ops import score
from graphrt.ops.key_panels import PANELS, ROWS, panel_width
from graphrt.ops.score_tree import Expr
from graphrt.tensor import Tensor, new_input
from graphrt.testing import AnyArray, quantize
from graphrt.tools.bench.op_shapes import CAP, Shape

#: The caches of a decode graph take at least so many bytes, and so many times the device's cache, in 4 to 64 nodes.
CACHES_BYTES, CACHES_TIMES, DECODE_NODES = 256 * 2**20, 4, (4, 64)
PREFILL_NODES = 2
#: Of dropout.
SEED = 2**33 + 9
#: Values that are drawn; what is larger repeats them with other signs.
_DRAWN = 2**21
#: Leafs begin so many blocks apart in the noise: odd, so that no two have their rows on the same values.
_APART = 4099


class Noise:
    """Normal values in each type, drawn once and handed out as slices: a large leaf costs no drawing and no copy.

    Blocks repeat after an odd number of them, each time with signs of their own.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._pools: dict[str, npt.NDArray[np.uint8]] = {}

    def take(self, kind: str, n: int, which: int) -> AnyArray:
        """`n` elements as the host has them, one dimension; another `which` gives others. Not to be written into."""
        dt = dtype(kind)
        start, count = which * _APART, n // dt.block_size
        pool = self._pools.get(kind)
        if pool is None or len(pool) < start + count:
            pool = self._pools[kind] = self._drawn(dt, start + count)
        return pool[start : start + count].reshape(-1).view(host_type(dt))

    def _drawn(self, dt: DType, count: int) -> npt.NDArray[np.uint8]:
        """uint8 [at least `count` blocks, bytes a block]; a longer pool begins as a shorter one does."""
        rng = np.random.default_rng([self.seed, dt.id if dt.id is not None else crc32(dt.name.encode())])
        period, count = _DRAWN // dt.block_size + 1, 1 << (count - 1).bit_length()
        values = rng.standard_normal((period, dt.block_size), np.float32)
        pattern = np.ascontiguousarray(quantize(values, dt)).view(np.uint8).reshape(period, dt.type_size)
        pool = np.empty((count, dt.type_size), np.uint8)
        for i in range(0, count, period):
            pool[i : i + period] = pattern[: count - i]
        sign = 1 if dt.is_quantized else dt.type_size - 1  # the byte with a scale's sign, or with the value's
        pool[:, sign] ^= np.frombuffer(rng.bytes(count), np.uint8) & 0x80
        return pool


@dataclass
class Program:
    """A shape's graph. nodes: what is measured; masks and sinks are shared. values: every leaf's, as written; fused: by
    node, FLASH_ATTN_EXT of the same sources, which of standard attention is not in the graph."""

    shape: Shape
    noise: Noise
    nodes: list[Tensor] = field(default_factory=list)
    values: dict[Tensor, AnyArray] = field(default_factory=dict)
    fused: dict[Tensor, Tensor] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        return Graph(*self.nodes)

    def fill(self, exe: Executable) -> None:
        """Writes every input."""
        for leaf, values in self.values.items():
            exe.write(leaf, values)

    def new_queries(self, exe: Executable, i: int) -> None:
        """Other values for node `i`'s queries."""
        q = self.fused[self.nodes[i]]["q"]
        self.values[q] = self.noise.take("f32", q.n_elements, len(self.nodes) + i).reshape(q.shape)
        exe.write(q, self.values[q])


def build(shape: Shape, n_nodes: int, noise: Noise, one_cache: bool = False) -> Program:
    """The graph of `n_nodes` attentions, each with k and v of its own, or all with the same.

    Raises GraphError where the op refuses the shape."""
    s, program = shape, Program(shape, noise)
    caches: list[tuple[Tensor, Tensor]] = []

    def leaf(name: str, kind: str, ne: tuple[int, ...], which: int) -> Tensor:
        t = new_input(kind, *ne, name=name)
        program.values[t] = noise.take(kind, t.n_elements, which)
        return t

    mask = _mask(program)
    sinks = new_input("f32", s.n_head, name="sinks") if s.sinks else None
    if sinks is not None:  # as heavy as all keys together: a sink that is left out must show
        program.values[sinks] = np.add(noise.take("f32", s.n_head, 0), np.float32(math.log(s.n_kv)))
    for i in range(n_nodes):
        q = leaf(f"q{i}", "f32", (s.d, s.n_q, s.n_head), i)
        program.values[q] = program.values[q].reshape(q.shape)
        if not (one_cache and caches):
            x = panel_width(dtype(s.kv_type)) if s.panels else 0
            ne = (x, s.n_kv, s.d // x * s.n_head_kv) if x else (s.d, s.n_kv, s.n_head_kv)
            k = leaf(f"k{i}", s.kv_type, ne, 2 * i)
            if s.v_in_k:
                v = ops.view(k, (s.d_v, s.n_kv, s.n_head_kv), k.nb[1:3], name=f"v{i}")
            else:
                v = leaf(f"v{i}", s.kv_type, (s.d_v, s.n_kv, s.n_head_kv), 2 * i + 1)
            caches.append((k, v))
        k, v = caches[-1]
        dropout: dict[str, Any] = {"dropout_p": s.dropout_p, "seed": SEED, "offset": i} if s.dropout_p else {}
        fused = node = ops.flash_attn_ext(
            q, k, v, mask, s.scale, sinks=sinks, max_bias=s.max_bias, softcap=s.softcap, prec=s.prec, score=_score(s),
            k_layout=PANELS if s.panels else ROWS, name=f"out{i}", **dropout,
        )  # fmt: skip
        if s.apart:
            node = standard_attention(q, k, v, mask, AttentionParams(s.scale, s.max_bias, s.softcap, sinks), fused.name)
        program.nodes.append(node)
        program.fused[node] = fused
    return program


def _score(s: Shape) -> Expr | None:
    made = {"identity": score.identity(), "softcap": score.softcap(CAP), "gate": score.sigmoid_gate(1.0)}
    return None if not s.score else score.alibi(s.n_head) if s.score == "slopes" else made[s.score]


def _mask(program: Program) -> Tensor | None:
    s = program.shape
    if s.mask == "none":
        return None
    mask = new_input("f16", s.n_kv, s.n_q, name="mask")
    if s.mask == "dense":
        values = program.noise.take("f16", mask.n_elements, 1).reshape(s.n_q, s.n_kv)
    else:
        values = np.zeros((s.n_q, s.n_kv), np.float16)
    if s.mask in ("causal", "distance"):
        for i, row in enumerate(values):  # by row: a matrix of positions would take eight times the mask
            own = i + s.n_kv - s.n_q
            row[own + 1 :] = -np.inf
            if s.mask == "distance":
                row[: own + 1] = np.arange(-own, 1)
    program.values[mask] = values
    return mask


def n_nodes_for(shape: Shape, device_cache_bytes: int) -> int:
    """How many nodes a shape's graph has. device_cache_bytes: the device's last-level cache."""
    if not shape.is_decode:
        return PREFILL_NODES
    least, most = DECODE_NODES
    wanted = max(CACHES_BYTES, CACHES_TIMES * device_cache_bytes)
    return min(max(-(-wanted // shape.cache_bytes), least), most)
