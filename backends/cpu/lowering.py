"""What lowering a group needs: addresses, torch looks, shared temporaries, and what must be kept alive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from graphrt.backend import Place
from graphrt.backends.cpu import fast
from graphrt.backends.cpu.memory import CpuBuffer, strided, zeros
from graphrt.bounds import span
from graphrt.tensor import Tensor

if TYPE_CHECKING:
    from graphrt.backends.cpu.fast import Columns, Step


class Given(NamedTuple):
    """Activations as a product of few tokens takes them. steps: what makes them, none if they are there already; at,
    row_bytes: their rows; bits: of a value, 32 for f32; columns: how they lie where they are no rows."""

    steps: list[Step]
    at: int
    row_bytes: int
    bits: int
    columns: Columns | None = None


class Lowering:
    """Lowers groups, given where tensors lie. keep: objects whose memory the native steps point to; bits: what
    activations of a product with quantized weights are rounded to, 32 for not at all; rows_alone: how a token is
    multiplied doesn't depend on how many others there are of its expert."""

    def __init__(self, place: Callable[[Tensor], Place], bits: int, *, rows_alone: bool = False) -> None:
        self.place, self.bits, self.rows_alone = place, bits, rows_alone
        self.keep: list[Any] = []
        self._temporaries: dict[tuple[str, int, int], torch.Tensor] = {}
        self._rounded: dict[int, tuple[Tensor, ...]] = {}  # by the address of what was made of them
        self._ordered: dict[int, Tensor] = {}  # likewise

    def program(self, steps: Sequence[Step]) -> Callable[[], None]:
        """Native steps as one native call."""
        joined = fast.Program(steps)
        self.keep.append(joined)
        return joined.call

    def at(self, t: Tensor | None) -> int:
        """The address of a tensor, 0 for an absent one. Raises MemoryPlanError for one that leaves its buffer."""
        if t is None:
            return 0
        buffer, offset = self.place(t)
        assert isinstance(buffer, CpuBuffer)
        start, _ = span(t, offset, buffer.nbytes)
        return buffer.memory.data_ptr() + start

    def look(self, t: Tensor) -> torch.Tensor:
        """The tensor's stored elements as torch sees them."""
        buffer, offset = self.place(t)
        assert isinstance(buffer, CpuBuffer)
        return strided(buffer.memory, offset, t)

    def array(self, values: Sequence[float], kind: type) -> int:
        """The address of a new constant array."""
        array: Any = np.asarray(values, kind)
        self.keep.append(array)
        return int(array.ctypes.data)

    def temporary(self, purpose: str, rows: int, n: int) -> torch.Tensor:
        """f32 [rows, n] that the steps of this program share for one purpose, one after the other."""
        known = self._temporaries.get((purpose, rows, n))
        if known is None:
            known = zeros(4 * rows * n).view(torch.float32).view(rows, n)
            self._temporaries[purpose, rows, n] = known
        return known

    def rounds(self, kind: str) -> bool:
        """Whether products with weights of a type round their activations."""
        return self.bits < 32 and kind in fast.CODE_TYPES

    def activations(self, x: Tensor, kind: str, panels: bool = False) -> Given:
        """`x`, whose rows lie evenly, for weights of a type. panels: for products of 16 rows at once. Weights that want
        the same form share what was rounded."""
        rows = rows_of(x)
        assert rows is not None
        if not self.rounds(kind):
            return Given([], self.at(x), rows[1], 32)
        form, n = (fast.panel_form_of if panels else fast.form_of)(kind, self.bits), x.ne[0]
        row_bytes = form.row_bytes(n)
        target = self.temporary(f"rounded {form.key}", rows[0], row_bytes // 4).data_ptr()
        step = fast.round_rows(form, dst=target, x=self.at(x), n_rows=rows[0], n=n, x_nb=rows[1])
        return Given(self._unless_there(step, target, x), target, row_bytes, self.bits)

    def few(self, x: Tensor, kind: str) -> Given:
        """The same for a matrix times few tokens: as columns where that is faster."""
        rows = rows_of(x)
        assert rows is not None
        columns = fast.columns_of(kind, self.bits, rows[0])
        if columns is None:
            return self.activations(x, kind)
        target = self.temporary("columns", 1, columns.bytes(x.ne[0]) // 4).data_ptr()
        step = fast.round_columns(columns, dst=target, x=self.at(x), n_tok=rows[0], n=x.ne[0], x_nb=rows[1])
        return Given(self._unless_there(step, target, x), target, 0, self.bits, columns)

    def split(self, x: Tensor, kind: str) -> tuple[list[Step], int]:
        """The same as tiles of bf16: the steps that make them, none where they are there already, and their address."""
        rows = rows_of(x)
        assert rows is not None
        form, n = fast.split_of(kind, self.bits), x.ne[0]
        target = self.temporary(f"split {form.key}", 1, form.bytes(n, rows[0]) // 4).data_ptr()
        step = fast.split_rows(form, dst=target, x=self.at(x), n_tok=rows[0], n=n, x_nb=rows[1])
        return self._unless_there(step, target, x), target

    def split_by_expert(
        self, x: Tensor, kind: str, ids: Tensor, starts: int, n_expert: int, n_slots: int, n_tok: int
    ) -> tuple[list[Step], int]:
        """The same of each expert's tokens, put in order at `starts`."""
        form, n, n_rows = fast.split_of(kind, self.bits), x.ne[0], fast.most_rows(n_expert, n_slots * n_tok)
        target = self.temporary(f"split {form.key} by expert", 1, form.bytes(n, n_rows) // 4).data_ptr()
        step = fast.split_pairs(
            form, dst=target, x=self.at(x), starts=starts, n=n, n_slots=n_slots, n_tok=n_tok, n_expert=n_expert,
            x_nb=(x.nb[1] if x.ne[1] > 1 else 0, x.nb[2]),
        )  # fmt: skip
        return self._unless_there(step, target, x, ids), target

    def _unless_there(self, step: Step, target: int, *made_of: Tensor) -> list[Step]:
        """A step that writes to target; none where what it makes lies there already."""
        if self._rounded.get(target) == made_of:
            return []
        self._rounded[target] = made_of
        return [step]

    def experts_in_order(self, ids: Tensor, n_expert: int, n_slots: int, n_tok: int) -> tuple[int, list[Step]]:
        """Where pairs of a token and a slot lie in order by their expert, and the step that puts them so, none where
        the products of the same experts before have."""
        n_bytes = fast.order_bytes(n_expert, n_slots * n_tok)
        starts = self.temporary("experts in order", 1, n_bytes // 4).data_ptr()
        if self._ordered.get(starts) is ids:
            return starts, []
        self._ordered[starts] = ids
        step = fast.expert_order(
            starts=starts, ids=self.at(ids), n_slots=n_slots, n_tok=n_tok, n_expert=n_expert, ids_nb=ids.nb[:2]
        )
        return starts, [step]


def rows_of(t: Tensor | None) -> tuple[int, int] | None:
    """(number of rows, bytes between them) of an f32 tensor whose rows lie evenly, else None."""
    if t is None or t.dtype.name != "f32" or not t.has_contiguous_rows:
        return None
    even = t.is_contiguous or t.ne[2] == t.ne[3] == 1
    return (t.n_rows, t.ne[0] * 4 if t.is_contiguous else t.nb[1]) if even else None
