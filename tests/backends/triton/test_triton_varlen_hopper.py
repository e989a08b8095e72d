"""Hopper's kernels over pages and packed keys without a GPU: their source on numpy arrays, partitions, TMA and wgmma in
many orders; attentions in several parts."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from graphrt.backends.triton import device
from graphrt.testing import Case, all_cases

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from support import varlen_emulation

from graphrt.backends.triton.kernels.flash_attn import launcher
from graphrt.backends.triton.kernels.flash_attn.varlen.hopper_launch import VarlenHopper, VarlenLatent, VarlenTiles
from graphrt.ops.cases.flash_attn_varlen import Axes, as_case

HALF = r"d=.64,64.,heads=.4,2.,types=.f16,f16.,"
#: Pages smaller and larger than k-blocks and boxes, packed keys, heads of each size, windows, ALiBi, sinks, soft caps;
#: queries before the first key; prompts and chunks of several tiles.
TILES = (
    HALF + r"page=(16|128),seqs=..40,40.*9,9.*.$", HALF + r"page=(16|64),seqs=..1,700",
    HALF + r"page=0,seqs=..40,40.*spare=5,causal=False",
    r"heads=.16,1.,.*1,97", r"heads=.7,1.,.*1,97", r"d=.(128,128|256,256).*page=16,seqs=..40,40",
    r"page=64,seqs=..40.*window=(1|100).$", r"40,40.*max_bias=8.0(,causal=False)?.$", r"page=16,seqs=..40.*sinks=near",
    r"page=0,seqs=..5,2.,.3,0.", r"page=32,seqs=..70,70.*window=20", r"page=32,seqs=..0,0.,.0,40",
)  # fmt: skip
LATENT = (r"d=.576,512.*f16,f16.,page=(16|64),",)
PARTS = (r"f16,f16.*page=16.*groups=",)


def _found(patterns: tuple[str, ...]) -> list[Case]:
    """Without those of explicit masks, which are the portable kernel's."""
    cases = [c for c in all_cases("FLASH_ATTN_VARLEN") if "mask=" not in str(c)]
    return [c for c in cases if any(re.search(part, str(c)) for part in patterns)]


def _check(case: Case, sm_count: int, seed: int, kernel: str) -> list[str]:
    _, kernels, found, expected = varlen_emulation.run(case, sm_count, seed)
    assert kernel in kernels, kernels
    np.testing.assert_allclose(found, expected, atol=2e-3)
    return kernels


@pytest.mark.parametrize("case", _found(TILES), ids=str)
@pytest.mark.parametrize("sm_count", [1, 5])
def test_tiles(case: Case, sm_count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tiles in rounds of one program, and tiles that five share; all sequences, the decode kernel's too."""
    monkeypatch.setattr(launcher, "varlen_kernels_of", lambda target: (VarlenTiles,))
    _check(case, sm_count, sm_count, "hopper_varlen_attn")


@pytest.mark.parametrize("case", _found(LATENT), ids=str)
@pytest.mark.parametrize("sm_count", [1, 7])
def test_latent_heads(case: Case, sm_count: int) -> None:
    _check(case, sm_count, sm_count, "hopper_varlen_mla")


@pytest.mark.parametrize(("kind", "sm_count"), [(VarlenTiles, 9), (VarlenTiles, 4), (VarlenLatent, 9)])
def test_tiles_of_about_one_length(kind: type[VarlenHopper], sm_count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut into as many parts each, or whole; the shorter ones lack some units, and some programs have nothing."""
    monkeypatch.setattr(launcher, "varlen_kernels_of", lambda target: (kind,))
    axes = Axes(page=16, seqs=((1, 1000), (1, 860)))
    if kind is VarlenLatent:
        axes = replace(axes, d=(576, 512), heads=(16, 1), layout="v_in_k")
    _check(
        as_case("FLASH_ATTN_VARLEN", axes),
        sm_count,
        0,
        "hopper_varlen_mla" if kind is VarlenLatent else "hopper_varlen_attn",
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_things_changes_nothing(seed: int) -> None:
    """The same bits whatever lands and goes on first."""
    for pattern in (HALF + r"page=16,seqs=..40,40", r"576,512.*f16,f16.,page=16,seqs=..1,70"):
        first, other = (varlen_emulation.run(_found((pattern,))[0], 3, n)[2] for n in (100, seed))
        np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize("case", _found(PARTS), ids=str)
@pytest.mark.parametrize("sm_count", [2, 6])
def test_groups_that_share_pages(case: Case, sm_count: int) -> None:
    """Shared keys and own ones apart, and sequences of few rows apart from those of many."""
    chosen, kernels, found, expected = varlen_emulation.run(case, sm_count, 0)
    np.testing.assert_allclose(found, expected, atol=2e-3)
    apart = "max_bias" not in str(case) and "score" not in str(case)
    assert ("join_prefix" in kernels) == any("keys that sequences share" in text for text in chosen.beside) == apart
    chunks = "[20,150]" in str(case) and "score" not in str(case)
    assert {"flash_attn_varlen_decode", "hopper_varlen_attn"} <= set(kernels) or not chunks
    assert any("up to 16 query rows" in text for text in chosen.beside) == chunks
