"""Adapters: LoRA files (arXiv 2106.09685) that a model has beside its weights, of which a text may have any.

Those of a matrix lie side by side: A, f32 [k, R], has the rows of all of them and B, f32 [R, m], the columns, times
alpha / rank. A product's result gets B (g * (A x)) added, where g, f32 [R, tokens], has for each token an adapter's
scale in that adapter's places, and 0 in those of the ones that its text has not. So texts with other adapters, several
or none share a step.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from graphrt import ops
from graphrt.backend import Backend, Usage
from graphrt.errors import SessionError
from graphrt.models.gguf import GGUFFile
from graphrt.models.step import AnyInputs
from graphrt.models.weights import Weights, fingerprint
from graphrt.op import build, op_spec
from graphrt.ops.recompute import post_order
from graphrt.printing import brief, brief_name
from graphrt.tensor import Tensor, new_tensor

F32 = npt.NDArray[np.float32]
#: Reads what there is to be had of A and B of a matrix, by the matrix's name; None where nothing is.
Reads = Callable[[GGUFFile, str], tuple[F32, F32] | None]
#: R is a multiple of this: rows and columns of nobody are 0.
_WHOLE = 16
SIDES = ".lora_a", ".lora_b"
#: Matrices in an error.
_MAX_NAMED = 8


@dataclass(frozen=True)
class AdapterFile:
    """One that was read. name: what it is called; rank: the largest of its matrices'; pairs: by the name of a weight
    [k, m], (a, f32 [rank, k]; b, f32 [m, rank], times alpha / rank), or of what was read of them; fingerprint: 32 bytes
    that tell it from others."""

    name: str
    rank: int
    pairs: Mapping[str, tuple[F32, F32]]
    fingerprint: bytes


def both_sides(file: GGUFFile, stem: str) -> tuple[F32, F32]:
    """All of A and B of a matrix."""
    return file.dequantize(stem + SIDES[0]), file.dequantize(stem + SIDES[1])


def read_adapter(path: Path, name: str, arch: str, weights: Weights, reads: Reads = both_sides) -> AdapterFile:
    """A GGUF file of an adapter, as llama.cpp's convert_lora_to_gguf.py and our training write it. weights: of the
    model; reads: what is read of it.

    Raises GGUFError for a file that can't be read, SessionError for one that is no LoRA adapter, or of another model.
    """
    with GGUFFile.open(path) as file:
        kind = file.get("general.type", str, ""), file.get("adapter.type", str, "")
        if kind != ("adapter", "lora"):
            raise _refused(name, f"be a LoRA adapter, it says general.type {brief(kind[0])} and adapter.type "
                           f"{brief(kind[1])}", "convert it with llama.cpp's convert_lora_to_gguf.py")  # fmt: skip
        of = file.get("general.architecture", str)
        if of != arch:
            raise _refused(name, f"be of the model's architecture, {arch}, it is of {brief(of)}", "use one of it")
        alpha = file.get("adapter.lora.alpha", float)
        if not math.isfinite(alpha):
            raise _refused(name, f"have an alpha that is a number, it has {alpha}", "convert it again")
        stems = {tensor.removesuffix(side) for tensor in file.tensors for side in SIDES if tensor.endswith(side)}
        others = set(file.tensors) - {stem + side for stem in stems for side in SIDES}
        if others or not stems:
            first = brief_name(min(others)) if others else "none at all"
            raise _refused(name, f"have tensors named .lora_a and .lora_b alone, it has {first}", "use another one")
        pairs, most = dict[str, tuple[F32, F32]](), 0
        for stem in sorted(stems):
            rank = _rank(file, name, stem, weights)
            most = max(most, rank)
            found = reads(file, stem)
            if found is not None:
                if not all(np.isfinite(side).all() for side in found):
                    raise _refused(name, f"have numbers, its {brief_name(stem)} has a NaN or an infinity", "convert it "
                                   "again")  # fmt: skip
                # an alpha of 0 is none, as llama.cpp has it
                pairs[stem] = found[0], found[1] * np.float32(alpha / rank if alpha else 1.0)
        digest = hashlib.sha256(repr(alpha).encode() + fingerprint(file)).digest()
    return AdapterFile(name, most, pairs, digest)


def _rank(file: GGUFFile, name: str, stem: str, weights: Weights) -> int:
    """Of one matrix, whose sides must fit the model's. Raises SessionError."""
    sides = [file.tensors.get(stem + side) for side in SIDES]
    a, b = sides
    if a is None or b is None:
        there, lacks = SIDES if b is None else SIDES[::-1]
        raise _refused(name, f"have both sides of a matrix, it has {brief_name(stem + there)} alone", f"add {lacks}")
    weight = weights.loaded.get(stem)
    if weight is None or weight.n_dims != 2:
        raise _refused(name, f"be of matrices that the model has, it has one of {brief_name(stem)}", "use another one")
    (k, m), rank = weight.ne[:2], b.ne[0]
    if a.ne != (k, rank) or b.ne != (rank, m):
        raise _refused(name, f"have sides of the shapes [{k}, rank] and [rank, {m}] for {stem}, it has {list(a.ne)} "
                       f"and {list(b.ne)}", "use one that was made for this model")  # fmt: skip
    return rank


def _refused(name: str, must: str, then: str) -> SessionError:
    return SessionError(f"the adapter {brief_name(name)} must {must}; {then}")


def check_scales(scales: Sequence[float], n: int) -> tuple[float, ...]:
    """One for each of n adapters. Raises SessionError for another number of them, and those that are none."""
    if len(scales) != n or not all(math.isfinite(scale) and abs(scale) < 1e6 for scale in scales):
        raise SessionError(f"{n} adapters must have a scale each, numbers under 1e6, got {brief(list(scales))}")
    return tuple(float(scale) for scale in scales)


class Adapters:
    """The adapters of a model's matrices. scales: of each where nobody says other ones; usual: f32 [R, 1], their column
    in memory, which sessions read; fingerprint: of all of them."""

    def __init__(self, files: Sequence[AdapterFile], scales: Sequence[float], weights: Weights, home: Backend) -> None:
        self.names = [file.name for file in files]
        if len(set(self.names)) != len(self.names):
            raise SessionError(f"adapters must have names of their own, got {brief(self.names)}; give NAME=FILE")
        self.scales = check_scales(scales, len(files))
        self.fingerprint = hashlib.sha256(b"".join(file.fingerprint for file in files)).digest()
        self._ends = np.cumsum([file.rank for file in files])
        self.rank = -(-int(self._ends[-1]) // _WHOLE) * _WHOLE
        stems = sorted({stem for file in files for stem in file.pairs})
        self._sides = {stem: self._stacked(files, weights.loaded[stem], home) for stem in stems}
        self.usual = new_tensor("f32", self.rank, 1, name="adapter_scales")
        self.usual.buffer = home.alloc(self.usual.nbytes, Usage.STATE)
        self.usual.buffer.write(0, self.column(self.scales).view(np.uint8))

    def _stacked(self, files: Sequence[AdapterFile], weight: Tensor, home: Backend) -> tuple[Tensor, Tensor]:
        """A and B of one matrix."""
        k, m = weight.ne[:2]
        a, b = np.zeros((self.rank, k), np.float32), np.zeros((m, self.rank), np.float32)
        for file, end in zip(files, self._ends):
            if weight.name in file.pairs:
                low, high = file.pairs[weight.name]
                first = int(end) - file.rank
                a[first : first + len(low)], b[:, first : first + len(low)] = low, high
        return _leaf(a, f"{weight.name}.lora_a", home), _leaf(b, f"{weight.name}.lora_b", home)

    def column(self, scales: Sequence[float]) -> F32:
        """g of a token whose text has these: f32 [R]."""
        found, first = np.zeros(self.rank, np.float32), 0
        for end, scale in zip(self._ends.tolist(), scales):
            found[first:end] = scale
            first = end
        return found

    def key(self, scales: Sequence[float]) -> bytes:
        """What tells texts apart whose tokens' rows in a cache differ by their adapters; b"" for none of them."""
        if not any(scales):
            return b""
        return b"a" + hashlib.sha256(self.fingerprint + np.array(scales, "<f8").tobytes()).digest()

    def added(self, result: Tensor, step: AnyInputs) -> Tensor:
        """The graph of `result` with the adapters' products added, by step.gates: f32 [R, n_tokens], or [R, 1] for all
        tokens. Raises SessionError where a matrix of theirs is multiplied with nothing."""
        assert step.gates is not None
        wanted = _after(result, step.rows)
        of_all = step.gates.ne[1] == 1
        gates = {False: step.gates, True: step.gates if of_all else ops.get_rows(step.gates, step.rows)}
        left = set(self._sides)

        def product(node: Tensor, x: Tensor) -> Tensor | None:
            sides = self._sides.get(node["weights"].name)
            if sides is None:
                return None
            left.discard(node["weights"].name)
            return ops.mul_mat(sides[1], ops.mul(ops.mul_mat(sides[0], x), gates[node in wanted]))

        made = with_products(result, product)
        if left:
            named = ", ".join(sorted(left)[:_MAX_NAMED])
            raise SessionError(f"adapters must be of matrices that tokens are multiplied with, got some of {named}; "
                               f"train adapters of others, or merge them into the model")  # fmt: skip
        return made


def with_products(result: Tensor, product: Callable[[Tensor, Tensor], Tensor | None]) -> Tensor:
    """The graph of `result` with something added to its products by weights, MUL_MAT nodes whose matrix is a leaf of
    two dimensions. product: gets such a node and what it reads in the new graph, gives what is added or None."""
    twins: dict[Tensor, Tensor] = {}
    for node in post_order(result):
        src = [None if s is None else twins.get(s, s) for s in node.src]
        twin = node if src == list(node.src) else build(op_spec(node.op), *src, params=node.params, name=node.name)
        if node.op == "MUL_MAT" and node["weights"].is_leaf and node["weights"].n_dims == 2:
            more = product(node, twin["x"])
            if more is not None:
                plain = build(op_spec(node.op), *src, params=node.params)
                twin = ops.add(plain, more, name=node.name)
        twins[node] = twin
    return twins.get(result, result)


def _after(result: Tensor, rows: Tensor) -> set[Tensor]:
    """The nodes that are of the tokens whose logits are wanted, no more of all tokens."""
    found: set[Tensor] = set()
    for node in post_order(result):
        if any(s in found for s in node.src) or (node.op == "GET_ROWS" and rows in node.src):
            found.add(node)
    return found


def _leaf(values: F32, name: str, home: Backend) -> Tensor:
    leaf = new_tensor("f32", *values.shape[::-1], name=name)
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    leaf.buffer = home.wrap_host(data) or home.hold(leaf, data)
    return leaf


class AdapterTable:
    """Which adapters each sequence of an engine has. table: f32 [R, n_seq], a column for each, in memory."""

    def __init__(self, adapters: Adapters, n_seq: int, home: Backend) -> None:
        self.adapters = adapters
        self.table = new_tensor("f32", adapters.rank, n_seq, name="adapter_table")
        self.table.buffer = home.alloc(self.table.nbytes, Usage.STATE)
        self._scales: dict[int, tuple[float, ...]] = {}
        for seq in range(n_seq):
            self.give(seq, adapters.scales)

    def give(self, seq: int, scales: Sequence[float]) -> None:
        """A sequence has these from the next step on, in the order of the device's work."""
        if self._scales.get(seq) != tuple(scales):
            self._scales[seq] = check_scales(scales, len(self.adapters.names))
            column = self.adapters.column(scales).view(np.uint8)
            assert self.table.buffer is not None
            self.table.buffer.write(seq * column.size, column)

    def of(self, seq: int) -> tuple[float, ...]:
        """The scales of a sequence's adapters."""
        return self._scales[seq]

    def any_of(self, seqs: Iterable[int]) -> bool:
        """Whether one of these sequences has one."""
        return any(map(any, (self._scales[seq] for seq in seqs)))
