"""The planted bugs of MUL_MAT_ID, ADD_ID and FILL, in the form of mutants_table.py."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from graphrt.tensor import Tensor
from graphrt.tools.conformance.mutants import pieces as on
from graphrt.tools.conformance.mutants.experts import TILE, MulMatId
from graphrt.tools.conformance.mutants.memory import Floats, Index, Kernel, Operand
from graphrt.tools.conformance.mutants.pieces import Mutant
from graphrt.tools.conformance.mutants.table_blocks import BLOCK_BUGS

MMID, ADD, FILL = "MUL_MAT_ID", "ADD_ID", "FILL"


def _pairs(node: Tensor) -> int:
    return node["ids"].n_elements


def _per_slot(node: Tensor) -> bool:
    return node["x"].ne[1] > 1


def _shared_x(node: Tensor) -> bool:
    return node["ids"].ne[0] > 1 and not _per_slot(node)


def _with_gaps(name: str) -> on.Pieces:
    """A source read as if it had no gaps."""

    def start(k: Kernel, x: Operand, i1: Index, i2: Index, i3: Index) -> Index:
        if x is not k.sources[name]:
            return Kernel.start(k, x, i1, i2, i3)
        ne, row = x.t.ne, x.t.nb[0] * (x.t.ne[0] // x.t.dtype.block_size)
        return np.asarray(x.base + ((i3 * ne[2] + i2) * ne[1] + i1) * row)

    return {"start": start}


def _gapped(name: str) -> on.Condition:
    return lambda node: not node[name].is_contiguous


def _ids_at(slot_step: str) -> on.Pieces:
    """ids read by strides that are not theirs."""

    def address(k: Kernel, ids: Operand, slot: Index, token: Index) -> Index:
        used, tokens = ids.t.ne[:2]
        at = {
            "of the shape": slot + token * used, "swapped": slot * tokens + token,
            "first token": slot, "first slot": token * (ids.t.nb[1] // 4),
        }[slot_step]  # fmt: skip
        return np.asarray(ids.base + 4 * at)

    return {"id_address": address}


def _first_of_equals(k: MulMatId, pair: Index, used: int, group: Index) -> npt.NDArray[np.bool_]:
    """Not those whose expert an earlier slot of the token has too."""
    table = group.reshape(-1, used)
    return np.array([table[p // used].tolist().index(group[p]) == p % used for p in pair])


def _packed_number(k: MulMatId, expert: int, group: Index) -> int:
    """The expert's number among those that some token has chosen."""
    return int((np.unique(group) < expert).sum())


def _padded_start(k: MulMatId, a: Operand, m: Index, matrix: int) -> Index:
    lost = -a.t.ne[1] % TILE
    return MulMatId.matrix_start(k, a, m, matrix) + matrix * lost * a.t.nb[1]


def _to_f16(x: Floats) -> Floats:
    return x.astype(np.float16).astype(np.float32)


_OUTSIDE: list[tuple[str, str, on.Pieces]] = [
    ("clamped", "an id that is no expert counts as the nearest one",
     {"group": lambda k, expert, n: np.clip(expert, 0, n - 1)}),
    ("from_the_end", "an id below 0 counts from the end", {"group": lambda k, expert, n: np.where(
        (expert >= -n) & (expert < n), expert % n, n)}),
    ("just_past", "the id just past the last expert is taken for it",
     {"group": lambda k, expert, n: np.where(expert == n, n - 1, np.where((expert >= 0) & (expert < n), expert, n))}),
]  # fmt: skip

EXPERT_MUTANTS = [
    *(Mutant(f"{name}_experts", MMID, what, pieces, on.types(*kinds)) for name, what, kinds, pieces in BLOCK_BUGS),
    *(Mutant(f"id_{name}_{op.lower()}", op, what, pieces) for name, what, pieces in _OUTSIDE for op in (MMID, ADD)),
    Mutant("outside_zero", MMID, "a row of no expert is 0", {"outside": lambda k, rows: rows}),
    Mutant("outside_without_bias", ADD, "a row of no expert gets no bias", {"outside": lambda k, rows: rows}),
    *(Mutant(f"ids_{name}_{op.lower()}", op, what, _ids_at(how), active)
      for op in (MMID, ADD)
      for name, what, how, active in (
          ("contiguous", "the ids' strides are taken from their shape", "of the shape", _gapped("ids")),
          ("swapped", "ids are read as [n_tokens, n_expert_used]", "swapped", on.always),
          ("first_token", "every token has the first one's experts", "first token", on.always),
          ("first_slot", "every slot has the first one's expert", "first slot", on.always),
      )),
    Mutant("x_first_slot", MMID, "every slot takes the token's first row of activations",
           {"x_slot": lambda k, slot, n_b: slot * 0}, _per_slot),
    Mutant("x_slot_of_shared", MMID, "slots take rows of their own where a token has only one",
           {"x_slot": lambda k, slot, n_b: slot}, _shared_x),
    Mutant("x_by_place", MMID, "activations are taken in order of experts, too", {"x_pair": lambda k, pair, at: at}),
    Mutant("out_by_place", MMID, "results stay in order of experts", {"out_pair": lambda k, pair, at: at}),
    Mutant("one_tile", MMID, "an expert's tokens past its first tile are lost",
           {"tiles": lambda k, first, last: range(first, min(last, first + TILE), TILE)},
           lambda node: _pairs(node) > TILE),
    Mutant("tile_tail", MMID, "an expert's tokens in a tile that is not full are lost",
           {"tiles": lambda k, first, last: range(first, first + (last - first) // TILE * TILE, TILE)}),
    Mutant("last_pair", MMID, "an expert's last token is lost",
           {"tiles": lambda k, first, last: range(first, last - 1, TILE)}),
    Mutant("equals_once", MMID, "an expert that a token has chosen twice is computed once", {"done": _first_of_equals}),
    Mutant("unused_experts_skipped", MMID, "experts are numbered without those that nobody chose",
           {"matrix": _packed_number}),
    Mutant("next_expert", MMID, "an expert has the next one's matrix",
           {"matrix": lambda k, expert, group: (expert + 1) % k.sources["weights"].t.ne[2]}),
    Mutant("experts_padded", MMID, "matrices are taken to begin at multiples of a tile's rows",
           {"matrix_start": _padded_start}, lambda node: node.ne[0] % TILE != 0),
    Mutant("experts_contiguous", MMID, "the weights' strides are taken from their shape", _with_gaps("weights"),
           _gapped("weights")),
    Mutant("activations_contiguous", MMID, "the activations' strides are taken from their shape", _with_gaps("x"),
           _gapped("x")),
    Mutant("expert_k_tail", MMID, "K's last block is dropped when it is not full",
           {"k_end": lambda k, n, width: n // width * width}),
    Mutant("expert_last_row", MMID, "the last row of the weights is lost", {"rows": lambda k, m: np.arange(m - 1)}),
    Mutant("f16_accumulator_experts", MMID, "sums are kept in f16", {"kept": lambda k, acc: _to_f16(acc)}),
    Mutant("summand_contiguous", ADD, "the first summand's strides are taken from its shape", _with_gaps("a"),
           _gapped("a")),
    Mutant("biases_contiguous", ADD, "the biases' strides are taken from their shape", _with_gaps("bias"),
           _gapped("bias")),
    Mutant("bias_last_column", ADD, "the last column gets no bias",
           {"total": lambda k, rows, biases: np.concatenate((rows[:, :-1] + biases[:, :-1], rows[:, -1:]), axis=1)}),
    Mutant("bias_f16", ADD, "biases are read in f16", {"total": lambda k, rows, biases: rows + _to_f16(biases)}),
    Mutant("fill_keeps_nan", FILL, "the value is added to 0 times what was there",
           {"filled": lambda k, rows: rows * 0 + np.float32(k.p.value)}),
    Mutant("fill_largest_for_infinite", FILL, "an infinity becomes the largest number",
           {"filled": lambda k, rows: np.full_like(rows, max(k.p.value, -3e38))}),
    Mutant("fill_0", FILL, "everything is 0", {"filled": lambda k, rows: np.zeros_like(rows)}),
]  # fmt: skip
