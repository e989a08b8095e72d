"""What attention, its gradients, small products and gradients of rows in f32 may be off by: no one computation decides,
and few bits less are seen."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch

from graphrt.ops.unary import UNARY_KINDS
from graphrt.tensor import Tensor
from graphrt.testing import Case, Inputs, all_cases
from graphrt.tools.conformance.run import lowprec, lowprec_back
from graphrt.tools.conformance.run.lowprec_drawn import Roundings
from graphrt.tools.conformance.run.reference import as_stored, know

CASES = {str(case).partition("(")[2][:-1]: case for case in all_cases("FLASH_ATTN_BACK")}
#: Of the first two one order says little of another; a score of 20 is rounded by up to 1e-6 before exp.
CHOSEN = (
    "of=v,n_kv=130,mask=None", "of=k,n_q=33,heads=[2,1],d=[256,256],mask=causal", "of=q,heads=[7,1],n_seq=2",
    "of=k,d_lse=True,sinks=True", "of=v,n_q=9,n_seq=2,dropout_p=0.3", "of=attn_bias,n_seq=2,bias=[4,2]",
)  # fmt: skip


def _named(name: str) -> Case:
    wanted = sorted(name.split(","))
    return next(case for found, case in CASES.items() if sorted(found.split(",")) == wanted)


def _cut(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Rounded to so many bits of mantissa; f32 has 24."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(torch.ldexp(mantissa, torch.tensor(bits))), exponent - bits)


@pytest.mark.parametrize("name", CHOSEN)
def test_another_order_is_right_and_five_bits_less_are_wrong(name: str) -> None:
    inputs = _named(name).build()
    known, honest = know(inputs), lowprec_back.in_order
    assert known.low is not None and len({draw.tobytes() for draw in known.low}) > 1

    def of_bits(rows: torch.Tensor, others: torch.Tensor, order: object = None) -> torch.Tensor:
        return honest(_cut(rows, 19), _cut(others, 19), order)  # type: ignore[arg-type]

    def others() -> np.ndarray:
        """Orders that the limit does not come from."""
        drawn = lowprec_back.drawn_order
        with mock.patch.object(lowprec_back, "drawn_order", lambda draw: drawn(draw + 16)):
            low = know(inputs).low
        assert low is not None and len(low) == 16
        return low.astype(np.float32)

    assert all(known.judge(inputs.result, draw).ok for draw in others())
    with mock.patch.object(lowprec_back, "in_order", of_bits):
        assert not any(known.judge(inputs.result, draw).ok for draw in others())


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_other_types_have_one(kind: str) -> None:
    low = know(_named(f"of=k,type={kind},mask=None").build()).low
    assert low is not None and len(low) == 1


#: A library may add a column up in an order of its own, so that a row of few columns is off more than its like.
PRODUCTS = (
    "MUL_MAT(type=f32,m=16,n=2,k=256)", "MUL_MAT(type=f32,m=5,n=1,k=256,batch_a=[2,3],batch_b=[6,6])",
    "MUL_MAT_ID(type=f32,m=16,k=256,n_expert=5,used=3,tokens=1,per_slot=True,ids=view)",
)  # fmt: skip


def _of(name: str, seed: int = 0) -> Inputs:
    return next(case for case in all_cases(name.partition("(")[0]) if str(case) == name).build(seed)


#: Keys of f32, which a library may add up in an order of its own; exp makes an error of a score one of a weight.
ATTENTION = (
    "FLASH_ATTN_EXT(d=[64,64],n_q=3,n_kv=257,heads=[6,2],n_seq=2,types=[f32,f32],mask=None,layout=panels)",
    "FLASH_ATTN_EXT(d=[64,64],n_q=1,n_kv=113,heads=[6,2],n_seq=2,types=[f16,f16],mask=causal,prec=10)",
    "FLASH_ATTN_VARLEN(d=[64,64],heads=[4,2],types=[f32,f32],page=16,seqs=[[2,40],[5,5],[8,130],[1,33]])",
)  # fmt: skip


@pytest.mark.parametrize("name", [*PRODUCTS, *ATTENTION])
def test_terms_may_be_added_up_one_by_one_and_six_bits_less_are_wrong(name: str) -> None:
    inputs = _of(name)
    known, drawn = know(inputs), lowprec_back.drawn_order
    assert known.low is not None and len({draw.tobytes() for draw in known.low}) == 4
    with mock.patch.object(lowprec_back, "drawn_order", lambda draw: drawn(draw + 16)):
        others = know(inputs).low
    assert others is not None
    assert all(known.judge(inputs.result, draw.astype(np.float32)).ok for draw in others)
    cut = _cut(torch.from_numpy(others.astype(np.float32)), 18).numpy()
    assert not any(known.judge(inputs.result, draw).ok for draw in cut)


def test_a_large_product_has_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    product = lowprec.DRAWN["MUL_MAT"]
    monkeypatch.setitem(lowprec.DRAWN, "MUL_MAT", product._replace(most=31))
    low = know(_of(PRODUCTS[0])).low
    assert low is not None and len(low) == 1


#: Of a row of one element a difference is left: d w - w (d w), and d - a (d a) / (a^2 + eps).
ROWS = (
    "SOFT_MAX_BACK(ne=[1,3,1,1],scale=0.125,gaps=True)", "SOFT_MAX_BACK(ne=[33,5,2,2],scale=1.0,gaps=False)",
    "RMS_NORM_BACK(ne=[1,7,1,1],eps=1e-05,values=small)", "RMS_NORM_BACK(ne=[2,3,1,1],eps=1e-05,values=huge)",
)  # fmt: skip


def _forms(op: str, node: Tensor, d: np.ndarray, x: np.ndarray) -> list[np.ndarray]:
    """A gradient of rows in the ways that kernels have it, in f32 of numpy."""
    f32 = np.float32
    if op == "SOFT_MAX_BACK":
        scale, total = f32(node.params.scale), (d * x).sum(-1, keepdims=True, dtype=f32)
        return [scale * x * (d - total), (d * x - x * total) * scale, x * (d * scale - total * scale)]
    n, eps = f32(x.shape[-1]), f32(node.params.eps)
    size = (x * x).sum(-1, keepdims=True, dtype=f32) / n + eps
    along, r = (d * x).sum(-1, keepdims=True, dtype=f32) / n, f32(1) / np.sqrt(size)
    return [
        (d - x * (along / size)) / np.sqrt(size),
        r * d - x * (along * (r * r * r)),
        r * (d - (x * r) * (along * r)),
    ]


@pytest.mark.parametrize("name", ROWS)
def test_a_gradient_of_rows_is_right_in_any_form_and_seven_bits_less_are_wrong(name: str) -> None:
    for seed in range(10):
        inputs = _of(name, seed)
        known, node = know(inputs), inputs.result
        assert known.low is not None and len({draw.tobytes() for draw in known.low}) == 16
        memory = {t: np.ascontiguousarray(v).reshape(-1).view(np.uint8) for t, v in inputs.values.items()}
        d, x = (as_stored(t, memory[t.root], t.view_offs) for t in node.sources())
        for form in _forms(node.op, node, d, x):
            verdict = known.judge(node, form)
            assert verdict.ok, (seed, verdict.message)
        coarse = (_cut(torch.from_numpy(given), 17).numpy() for given in (d, x))
        assert not any(known.judge(node, form).ok for form in _forms(node.op, node, *coarse)), seed


#: All ops of which single elements are judged by drawn roundings.
DRAWN = (
    *ROWS, "SILU_BACK(kind=silu,type=f32,ne=[1,7,1,1],values=spread)", "OPT_STEP_SGD(ne=[1,7,1,1],wd=0.1,alpha=0.5)",
    "OPT_STEP_ADAMW(ne=[1,7,1,1],wd=0.1,alpha=0.5)",
    *(f"UNARY_BACK(kind={kind},type=f32,ne=[1,7,1,1],values=spread)" for kind in UNARY_KINDS if kind != "silu"),
)  # fmt: skip


@pytest.mark.parametrize("name", DRAWN)
def test_what_is_drawn_is_the_formula(name: str) -> None:
    """Each draw's error is of the size of float32's roundings, and their mean is smaller: nothing but roundings."""
    inputs = _of(name)
    known = know(inputs)
    assert known.low is not None and len(known.low) == 16
    expected, low = np.asarray(known.expected, np.float64), np.asarray(known.low, np.float64)
    size = np.abs(expected).max()
    assert np.abs(low - expected).max() < 2.0**-18 * size
    assert np.abs(low.mean(0) - expected).max() < 2.0**-20 * size


def test_each_term_of_a_sum_is_rounded() -> None:
    """Of ones the partial sums are 2, 3, ..., n, each off by a random part of half a unit in the last place."""
    n = 100
    sums = Roundings(0).sum(torch.ones(2000, n, dtype=torch.float64))
    deviation = 2.0**-24 * (sum(j * j for j in range(2, n + 1)) / 3) ** 0.5
    assert sums.shape == (2000, 1)
    assert float((sums - n).square().mean() ** 0.5) == pytest.approx(deviation, rel=0.1)
