"""Conformance cases of SAMPLE: each filter by itself, all and none, equal logits, wide vocabularies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from graphrt.ops.sample import MAX_TOP_K, SampleParams, sample
from graphrt.tensor import Tensor
from graphrt.testing import Case, Init, Inputs, Normal, Uniform, register_cases

#: One sampler at a time, all, none; as much kept as there is; a temperature that leaves one choice.
_PARAMS = (
    SampleParams(),
    SampleParams(1.0, 1, 1.0, 0.0),
    SampleParams(1.5, 40, 1.0, 0.0),
    SampleParams(1.0, 200, 0.5, 0.0),
    SampleParams(0.7, 64, 1.0, 0.2),
    SampleParams(3.0, 30, 0.0, 1.0, 5),
    SampleParams(1e-3, 7, 0.9, 0.0),
)


def _cases() -> Iterator[Case]:
    # Normal logits; with a step, many equal ones. 5 and 128: top_k reaches beyond, or is most of it.
    grid = [((n, m), 3.0, 0.0, p) for n, m in ((5, 3), (128, 4), (3001, 4)) for p in _PARAMS]
    grid += [((3001, 2), 1.0, 0.5, p) for p in _PARAMS[:5]]
    grid += [((40000, 2), 2.0, step, SampleParams(1.2, 50, 0.9, 0.01)) for step in (0.0, 0.25)]
    grid += [((3001, 1), 2.0, step, SampleParams(1.2, MAX_TOP_K, 0.99, 0.001)) for step in (0.0, 0.25)]
    yield from _of(grid)
    yield Case("SAMPLE", {"ne": (77, 4), "uniforms": "f32"}, _maker((77, 4), Normal(2.0), SampleParams(2.0), "f32"))


def _full_cases() -> Iterator[Case]:
    yield from _cases()
    wide = (SampleParams(), SampleParams(1.2, MAX_TOP_K, 0.99, 0.001))
    yield from _of([((262144, m), 2.0, step, p) for m in (1, 3) for step in (0.0, 0.25, 64.0) for p in wide])


def _of(grid: Iterable[tuple[tuple[int, int], float, float, SampleParams]]) -> Iterator[Case]:
    for ne, std, step, p in grid:
        axes = {"ne": ne, "std": std, "step": step, **vars(p)}
        yield Case("SAMPLE", axes, _maker(ne, Normal(std, step=step), p))


def _maker(ne: tuple[int, int], logits: Init, params: SampleParams, kind: str = "f64") -> Callable[[Inputs], Tensor]:
    def make(inputs: Inputs) -> Tensor:
        return sample(inputs("logits", "f32", ne, logits), inputs("u", kind, ne[1:], Uniform(0.0, 1.0)), params)

    return make


register_cases("SAMPLE", quick=_cases, full=_full_cases)
