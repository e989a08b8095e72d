"""The sets of FLASH_ATTN_EXT's cases: that they are as large as said, name each case once and hold each value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from graphrt.ops.cases.flash_attn import TYPES, cases, points
from graphrt.ops.cases.flash_attn_axes import LAYOUTS, MASKS, ROWS, SINKS, SPOILS, VALUES, Axes, as_case
from graphrt.ops.cases.flash_attn_ggml import ggml_cases, ggml_points
from graphrt.testing import Case, all_cases

QUICK, FULL = points("quick"), points("full")


@pytest.mark.parametrize("op", ["FLASH_ATTN_EXT", "FLASH_ATTN_LSE"])
@pytest.mark.parametrize("which", ["quick", "full", "ggml"])
def test_every_case_has_a_name_of_its_own(op: str, which: str) -> None:
    names = [str(case) for case in all_cases(op, which)]
    assert len(set(names)) == len(names)
    if which == "ggml":
        assert names == ([str(case) for case in ggml_cases()] if op == "FLASH_ATTN_EXT" else [])
    else:
        assert names == [str(case) for case in cases(op, which)]


def test_how_many() -> None:
    assert 300 <= len(QUICK) <= 440
    assert 1500 <= len(FULL) <= 3400
    assert len(list(cases("FLASH_ATTN_LSE"))) <= 200
    assert len(list(ggml_cases())) == 5308


def test_quick_is_part_of_full() -> None:
    for op in ("FLASH_ATTN_EXT", "FLASH_ATTN_LSE"):
        assert {str(c) for c in cases(op)} <= {str(c) for c in cases(op, "full")}


def test_a_set_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="quick or full, got 'slow'"):
        list(cases("FLASH_ATTN_EXT", "slow"))


def test_the_main_loop_of_ggml_pair_by_pair() -> None:
    main = Counter((a.hsk, a.hsv) for a in ggml_points()[36:-72])
    assert main == {
        (40, 40): 224, (64, 64): 2016, (72, 72): 1008, (80, 80): 112, (96, 64): 112, (96, 96): 112, (128, 128): 528,
        (192, 128): 176, (192, 192): 176, (256, 256): 112, (320, 256): 256, (512, 512): 112, (576, 512): 256,
    }  # fmt: skip


def test_names_are_as_ggml_prints_them() -> None:
    assert str(next(iter(ggml_cases()))) == (
        "FLASH_ATTN_EXT(hsk=64,hsv=64,nh=8,nr23=[4,1],kv=1024,nb=32,mask=1,sinks=0,max_bias=0.000000,"
        "logit_softcap=0.000000,prec=f32,type_K=f16,type_V=f16,permute=[0,1,2,3],kv_view=1,v_is_view_of_k=0,n_kv_max=0)"
    )


def test_the_names_of_ggml_are_names_of_its_own_cases() -> None:
    again = [str(c) for c in ggml_cases() if "again" in c.axes]
    assert len(again) == 1 and "hsk=576" in again[0] and "nr23=[20,1]" in again[0]


def ratio(axes: Axes) -> int:
    return axes.heads[0] // axes.heads[1]


WANTED: dict[str, tuple[Callable[[Axes], object], set[object]]] = {
    "mask": (lambda a: a.mask, {None, *MASKS}),
    "rows": (lambda a: a.rows, {None, *ROWS}),
    "sinks": (lambda a: a.sinks, {None, *SINKS}),
    "values": (lambda a: a.values, set(VALUES)),
    "layout": (lambda a: a.layout, set(LAYOUTS)),
    "spoil": (lambda a: a.spoil, {None, *SPOILS}),
    "type of k": (lambda a: a.types[0], set(TYPES)),
    "type of v": (lambda a: a.types[1], set(TYPES)),
    "n_kv": (lambda a: a.n_kv, {1, 17, 255, 257, 1025, 10000}),
    "n_q": (lambda a: a.n_q, {1, 2, 3, 4, 5, 6, 7, 8, 33, 512}),
    "n_q over n_kv": (lambda a: a.n_q > a.n_kv > 1, {True, False}),
    "GQA ratio": (ratio, {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 32, 64}),
    "ratio that two heads of k share": (lambda a: a.heads[1] > 1 and ratio(a), {3, 5, 6, 7, 12, 20}),
    "n_seq": (lambda a: a.n_seq, {1, 2, 4}),
    "head sizes": (
        lambda a: a.d,
        {(32, 32), (40, 40), (65, 67), (72, 72), (80, 80), (96, 64), (112, 112), (128, 128), (192, 128), (256, 256),
         (320, 256), (512, 512), (576, 512)},
    ),
    "softcap near the logits": (lambda a: (a.softcap, a.values), {(10.0, "hot")}),
    "empty rows with and without sinks": (
        lambda a: (a.rows, a.sinks), {(rows, sinks) for rows in ROWS for sinks in (None, "near")}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WANTED)
def test_the_quick_set_has_every_value(name: str) -> None:
    of, wanted = WANTED[name]
    assert wanted <= {of(axes) for axes in QUICK}


def test_the_full_set_has_the_longest_context() -> None:
    assert 131072 in {axes.n_kv for axes in FULL}


def _built(axes: Axes) -> Case:
    case = as_case("FLASH_ATTN_EXT", axes)
    case.build()
    return case


def test_every_point_of_the_full_set_can_be_built() -> None:
    """Building checks every rule of the op; one of each combination of layout, types and mask is enough."""
    chosen = {(a.layout, a.types, a.mask, a.spoil): a for a in FULL if a.layout != "far" and a.n_kv < 2000}
    for axes in chosen.values():
        _built(axes)


def _nodes_of_ggml() -> dict[object, Case]:
    found = list(zip(ggml_points(), ggml_cases()))
    return {(a.hsk, a.hsv, a.type_K, a.type_V, a.permute, a.v_is_view_of_k): c for a, c in found if a.kv <= 512}


def test_ggmls_cases_can_be_built() -> None:
    for case in _nodes_of_ggml().values():
        node = case.build().result
        assert node.ne[0] >= int(str(case.axes["hsv"])), str(case)


def test_only_what_is_hidden_is_spoiled() -> None:
    """The cells that hold NaN are those that the mask hides from every query, and there are some."""
    checked = 0
    for axes in QUICK:
        if axes.spoil is None or axes.types != ("f16", "f16") or axes.layout != "plain":
            continue
        given = {t.name: values for t, values in as_case("FLASH_ATTN_EXT", axes).build().values.items()}
        hidden = np.isneginf(given["mask"]).all(axis=(0, 1, 2))
        for name in ("k", "v"):
            bad = ~np.isfinite(given[name]).all(axis=(0, 1, 3))
            assert bad.any() and not (bad & ~hidden).any()
            checked += 1
    assert checked > 10


def test_the_largest_case_says_what_it_needs() -> None:
    needing = [c for c in cases("FLASH_ATTN_EXT") if c.needs_bytes]
    assert len(needing) == 1 and needing[0].axes["layout"] == "far" and needing[0].needs_bytes > 2**33


@pytest.mark.parametrize("name", MASKS)
def test_every_mask_hides_some_keys_and_shows_some(name: str) -> None:
    mask = MASKS[name](np.random.default_rng(0), (2, 4, 130, 513))
    hidden = np.isneginf(mask)
    assert 0.1 < hidden.mean() < 0.99 and not np.isnan(mask).any()
