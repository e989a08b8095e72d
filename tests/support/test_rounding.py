"""The error bounds of rounding.py: plain f32 arithmetic stays below them, not far, and small planted bugs do not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from graphrt import get_backend
from graphrt.backends.cpu import attention, products
from graphrt.backends.cpu.reference import REFERENCES, Function, Reference
from graphrt.testing import Case, all_cases
from support.judging import Judged
from support.rounding import largest_energy, of_products, of_sum

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (0.0, 1.0), (0.9, 1.1)])
def test_a_plain_sum_is_as_far_off_as_its_bound_says(low: float, high: float) -> None:
    """cumsum adds one term after the other, on every machine. A tenth of the variance is a third of the error."""
    terms = RNG.uniform(low, high, (2000, 300)).astype(np.float32)
    exact = terms.astype(np.float64).sum(1)
    error = np.cumsum(terms, axis=1, dtype=np.float32)[:, -1] - exact
    bound = of_sum((terms.astype(np.float64) ** 2).sum(1), exact, 300)
    assert 0.1 < (error**2).sum() / bound.sum() < 1


def test_products_one_term_after_the_other() -> None:
    a, b = (RNG.standard_normal((n, 200)).astype(np.float32) for n in (30, 40))
    found = np.cumsum(b[:, None] * a, axis=2, dtype=np.float32)[..., -1]
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    ratio = ((found - b64 @ a64.T) ** 2).sum() / of_products(a64, b64, np.zeros_like(a64)).sum()
    assert 0.1 < ratio < 1


@pytest.mark.parametrize("n", [1, 10, 1000])
def test_energies_above_the_largest_are_as_rare_as_it_says(n: int) -> None:
    """None of 5,000 draws comes near it, and it is no more than a few times the largest of them."""
    weights = RNG.uniform(0.1, 1, n)
    drawn = np.array([(weights * RNG.standard_normal(n) ** 2).sum() for _ in range(5000)])
    assert drawn.max() < largest_energy(weights) < 6 * drawn.max()


def _tf32(x: torch.Tensor) -> torch.Tensor:
    """Rounded to 10 bits behind the point, as tensor cores take f32."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def _weights_in_f16(old: Function) -> Function:
    def softmax(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, lse = old(*args)
        return weights.half().float(), lse

    return softmax


#: What is replaced, by what, and part of the name of a case in which that is wrong.
BUGS: dict[str, tuple[object, str, Callable[[Function], Function], str]] = {
    "weights in f16": (attention, "_softmax", _weights_in_f16, "n_q=9,n_kv=113"),
    "the last key dropped": (attention, "last_seen", lambda old: lambda *a: old(*a) - 1, "n_q=9,n_kv=113"),
    "q in tf32": (attention, "bent_logits", lambda old: lambda p, q, *a: old(p, _tf32(q), *a), "n_q=9,n_kv=113"),
    "a scale 1e-5 off": (attention, "bent_logits", lambda old: lambda p, q, *a: old(p, q * 1.00001, *a), "n_q=40"),
    "products in tf32": (products, "dense", lambda old: lambda x, w: old(_tf32(x), _tf32(w)), "n=16"),
}


def _case(op: str, part: str) -> Case:
    return next(case for case in all_cases(op) if part in str(case))


@pytest.mark.parametrize("bug", BUGS)
def test_a_small_bug_passes_the_bound(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, spoil, part = BUGS[bug]
    exact = module is attention
    judged = Judged(_case("FLASH_ATTN_EXT" if exact else "MUL_MAT", part))
    judged.check(judged.run(get_backend("cpu", exact=exact)))
    monkeypatch.setattr(module, name, spoil(getattr(module, name)))
    with pytest.raises(AssertionError, match="times what rounding explains"):
        judged.check(judged.run(get_backend("cpu", exact=exact)))


def test_one_wrong_row_does_not_hide_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    old = REFERENCES["MUL_MAT"]

    def off(node: object, *sources: torch.Tensor) -> torch.Tensor:
        out = old.function(node, *sources)
        out[..., -1, :] *= 1 + 8e-6
        return out

    judged = Judged(_case("MUL_MAT", "m=16,n=128,k=256"))
    monkeypatch.setitem(REFERENCES, "MUL_MAT", Reference(off, old.stored))
    with pytest.raises(AssertionError, match="a row's error is"):
        judged.check(judged.run("cpu"))
