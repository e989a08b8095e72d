"""The fusions of the CPU backend's fast form, which become one native step each. A row stands beside its lowering."""

from __future__ import annotations

from graphrt.backends.cpu.experts import MUL_MAT_ID_ADD_ID
from graphrt.backends.cpu.lower_maps import SOFTCAP
from graphrt.backends.cpu.lower_rows import LAYER_NORM, NORM_MUL
from graphrt.backends.cpu.products import GATE_UP_GLU, MATMUL_ADD
from graphrt.fusion import Fusion

#: In the order in which they are tried: a node belongs to the first group that takes it.
FUSIONS: tuple[Fusion, ...] = (NORM_MUL, LAYER_NORM, GATE_UP_GLU, MATMUL_ADD, MUL_MAT_ID_ADD_ID, SOFTCAP)
