"""What gradients of attention and small products in f32 may be off by: no one order of adding up decides, and few bits
less are seen."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch

from graphrt.testing import Case, Inputs, all_cases
from graphrt.tools.conformance.run import lowprec, lowprec_back
from graphrt.tools.conformance.run.reference import know

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
        with mock.patch.object(lowprec_back, "drawn_order", lambda draw: drawn(draw + lowprec.DRAWS)):
            low = know(inputs).low
        assert low is not None and len(low) == lowprec.DRAWS
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


def _product(name: str) -> Inputs:
    return next(case for case in all_cases(name.partition("(")[0]) if str(case) == name).build()


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_may_be_added_up_term_by_term_and_six_bits_less_are_wrong(name: str) -> None:
    inputs = _product(name)
    known, drawn = know(inputs), lowprec_back.drawn_order
    assert known.low is not None and len({draw.tobytes() for draw in known.low}) == lowprec.PRODUCT_DRAWS
    with mock.patch.object(lowprec_back, "drawn_order", lambda draw: drawn(draw + lowprec.DRAWS)):
        others = know(inputs).low
    assert others is not None
    assert all(known.judge(inputs.result, draw.astype(np.float32)).ok for draw in others)
    cut = _cut(torch.from_numpy(others.astype(np.float32)), 18).numpy()
    assert not any(known.judge(inputs.result, draw).ok for draw in cut)


def test_a_large_product_has_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowprec, "FEW", 31)
    low = know(_product(PRODUCTS[0])).low
    assert low is not None and len(low) == 1
