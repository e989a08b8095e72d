"""What gradients of attention in f32 may be off by: no one order of adding up decides, and few bits less are seen."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch

from graphrt.testing import Case, all_cases
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
