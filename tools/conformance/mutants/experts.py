"""MUL_MAT_ID, ADD_ID and FILL the way GPU kernels compute them, in pieces that mutants replace."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from graphrt.tools.conformance.mutants.kernels import BlockSums
from graphrt.tools.conformance.mutants.memory import Floats, Index, Kernel, Operand, last_dims

#: Pairs of token and expert that a tile has at most.
TILE = 16


class Chosen(Kernel):
    """What both ops know of ids: pair p is slot p % used of token p // used."""

    def experts_of(self, token: Index, slot: Index) -> Index:
        ids = self.sources["ids"]
        return self.read_ints(ids, self.id_address(ids, slot, token))

    def id_address(self, ids: Operand, slot: Index, token: Index) -> Index:
        return np.asarray(ids.base + slot * ids.t.nb[0] + token * ids.t.nb[1])

    def group(self, expert: Index, n_expert: int) -> Index:
        """The expert, n_expert for an id that is none."""
        return np.where((expert >= 0) & (expert < n_expert), expert, n_expert)

    def outside(self, rows: Floats) -> Floats:
        """What rows of no expert hold. rows: what they would without their expert's part."""
        return np.full_like(rows, np.nan)


class MulMatId(Chosen, BlockSums):
    """Pairs in order of experts, in tiles of one expert's."""

    op = "MUL_MAT_ID"

    def run(self) -> None:
        n_expert, (used, tokens) = self.sources["weights"].t.ne[2], self.sources["ids"].t.ne[:2]
        pair = np.arange(used * tokens)
        group = self.group(self.experts_of(pair // used, pair % used), n_expert)
        order = np.argsort(group, kind="stable")
        first = np.searchsorted(group[order], np.arange(n_expert + 2))
        for expert in range(n_expert + 1):
            for start in self.tiles(int(first[expert]), int(first[expert + 1])):
                place = np.arange(start, min(start + TILE, int(first[expert + 1])))
                self.tile(expert, order[place], place, used, group)

    def tiles(self, first: int, last: int) -> range:
        """Where the tiles of an expert begin."""
        return range(first, last, TILE)

    def tile(self, expert: int, pair: Index, place: Index, used: int, group: Index) -> None:
        a, b = self.sources["weights"], self.sources["x"]
        m = self.rows(a.t.ne[1])
        if expert == a.t.ne[2]:
            acc = self.outside(np.zeros((len(pair), len(m)), np.float32))
        else:
            x = self.x_pair(pair, place)
            zero = np.asarray(0)
            starts_a = self.matrix_start(a, m, self.matrix(expert, group))
            starts_b = self.start(b, self.x_slot(x % used, b.t.ne[1]), x // used, zero)
            acc = self.sums(a, starts_a, b, starts_b)
        to, done = self.out_pair(pair, place), self.done(pair, used, group)
        starts = self.start(self.out, to % used, to // used, np.asarray(0))
        self.write(self.out, starts[done], acc[done])

    def matrix_start(self, a: Operand, m: Index, matrix: int) -> Index:
        return self.start(a, m, np.asarray(matrix), np.asarray(0))

    def matrix(self, expert: int, group: Index) -> int:
        """Which matrix an expert has."""
        return expert

    def x_pair(self, pair: Index, place: Index) -> Index:
        """Whose activations a pair, at a place in the order of experts, takes."""
        return pair

    def x_slot(self, slot: Index, n_b: int) -> Index:
        """Dimension 1 of the activations of a slot."""
        return slot * (n_b > 1)

    def out_pair(self, pair: Index, place: Index) -> Index:
        return pair

    def done(self, pair: Index, used: int, group: Index) -> npt.NDArray[np.bool_]:
        """Which pairs' rows are stored: all."""
        return pair >= 0


class AddId(Chosen):
    """One row a pair."""

    op = "ADD_ID"

    def run(self) -> None:
        a, b = self.sources["a"], self.sources["bias"]
        n, used, tokens, _ = a.t.ne
        token, slot = np.repeat(np.arange(tokens), used), np.tile(np.arange(used), tokens)
        zero, n_expert = np.asarray(0), b.t.ne[1]
        group = self.group(self.experts_of(token, slot), n_expert)
        rows = self.read(a, self.start(a, slot, token, zero), n)
        chosen = self.start(b, np.where(group < n_expert, group, 0), zero, zero)
        total = self.total(rows, self.read(b, chosen, n))
        none = group == n_expert
        total[none] = self.outside(rows[none])
        self.write(self.out, self.start(self.out, slot, token, zero), total)

    def total(self, rows: Floats, biases: Floats) -> Floats:
        return rows + biases


class Fill(Kernel):
    """The value in every element, row by row."""

    op = "FILL"

    def run(self) -> None:
        a = self.sources["a"]
        i3, i2, i1 = last_dims(a)
        rows = self.read(a, self.start(a, i1, i2, i3), a.t.ne[0])
        self.write(self.out, self.start(self.out, i1, i2, i3), self.filled(rows))

    def filled(self, rows: Floats) -> Floats:
        return np.full_like(rows, self.p.value)
