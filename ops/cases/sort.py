"""Conformance cases of ARGMAX, ARGSORT and TOP_K."""

from __future__ import annotations

from collections.abc import Iterator

from graphrt.ops.sort import argmax, argsort, top_k
from graphrt.tensor import Tensor
from graphrt.testing import Case, Distinct, Inputs, register_cases


def _argmax_cases() -> Iterator[Case]:
    for ne in [(1, 3), (33, 5), (5000, 2)]:

        def make(inputs: Inputs, ne: tuple[int, ...] = ne) -> Tensor:
            return argmax(inputs("a", "f32", ne, Distinct()))

        yield Case("ARGMAX", {"ne": ne}, make)


def _argsort_cases() -> Iterator[Case]:
    for ne in [(1, 3, 1, 1), (33, 5, 2, 2), (1000, 2, 1, 1)]:
        for descending in (False, True):

            def make(inputs: Inputs, ne: tuple[int, ...] = ne, descending: bool = descending) -> Tensor:
                return argsort(inputs("a", "f32", ne, Distinct()), descending)

            yield Case("ARGSORT", {"ne": ne, "descending": descending}, make)


def _top_k_cases() -> Iterator[Case]:
    for ne, k in [((8, 5, 1, 1), 2), ((8, 1, 2, 3), 8), ((3000, 2, 1, 1), 40)]:

        def make(inputs: Inputs, ne: tuple[int, ...] = ne, k: int = k) -> Tensor:
            return top_k(inputs("a", "f32", ne, Distinct()), k)

        yield Case("TOP_K", {"ne": ne, "k": k}, make)


register_cases("ARGMAX", quick=_argmax_cases)
register_cases("ARGSORT", quick=_argsort_cases)
register_cases("TOP_K", quick=_top_k_cases)
