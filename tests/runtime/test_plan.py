"""The memory planner: no two live tensors overlap, and blocks are taken over only when that is allowed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrt import plan
from graphrt.plan import MemoryPlan, Request, plan_memory

ALIGNMENT = 64


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    """Requests in the order of their first step, as the runtime makes them; some may take over earlier blocks."""
    made: list[Request] = []
    for key, first in enumerate(sorted(draw(st.lists(st.integers(0, 12), min_size=1, max_size=24)))):
        givers = [r.key for r in made if r.last == first and r.first < first]
        takes = tuple(draw(st.lists(st.sampled_from(givers), unique=True, max_size=2))) if givers else ()
        wild = tuple(draw(st.lists(st.integers(0, 30), max_size=1)))  # a wish that must not be granted unless it can be
        last = first + draw(st.integers(0, 6))
        made.append(Request(key, draw(st.integers(1, 1000)), first, last, takes + wild))
    return made


def violations(made: Sequence[Request], result: MemoryPlan) -> list[str]:
    """What is wrong with a plan, found by looking at every pair."""
    wrong = []
    by_key = {r.key: r for r in made}
    for r in made:
        start = result.offsets[r.key]
        if start % ALIGNMENT or start + r.nbytes > result.peak:
            wrong.append(f"{r.key} lies at {start}, unaligned or outside")
    for i, a in enumerate(made):
        for b in made[i + 1 :]:
            alive_together = a.first <= b.last and b.first <= a.last
            x, y = result.offsets[a.key], result.offsets[b.key]
            overlap = x < y + b.nbytes and y < x + a.nbytes
            if alive_together and overlap and not _handed_over(a, b, result):
                wrong.append(f"{a.key} and {b.key} overlap")
    for taker, giver in result.taken_over.items():
        a, b = by_key[giver], by_key[taker]
        if giver not in b.takes_over or a.last != b.first or result.offsets[taker] != result.offsets[giver]:
            wrong.append(f"{taker} took over {giver}")
    if len(set(result.taken_over.values())) != len(result.taken_over):
        wrong.append("two took over one block")
    return wrong


def _handed_over(a: Request, b: Request, result: MemoryPlan) -> bool:
    """One took the other's block at the one step where both are alive."""
    return (result.taken_over.get(b.key) == a.key and a.last == b.first) or (
        result.taken_over.get(a.key) == b.key and b.last == a.first
    )


def _sweep(made: Sequence[Request]) -> int:
    """The least any plan without taking over needs: the most bytes that are alive at one step."""
    steps = range(max(r.last for r in made) + 1)
    return max(sum(-(-r.nbytes // ALIGNMENT) * ALIGNMENT for r in made if r.first <= s <= r.last) for s in steps)


@settings(max_examples=300)
@given(requests())
def test_a_plan_is_sound(made: list[Request]) -> None:
    result = plan_memory(made, ALIGNMENT)
    assert violations(made, result) == []
    assert set(result.offsets) == {r.key for r in made}
    assert result.live_peak <= result.peak <= result.total
    again = plan_memory(made, ALIGNMENT)
    assert (again.offsets, again.peak, again.taken_over) == (result.offsets, result.peak, result.taken_over)


@settings(max_examples=100)
@given(requests())
def test_without_taking_over_the_live_peak_is_exact(made: list[Request]) -> None:
    alone = [Request(r.key, r.nbytes, r.first, r.last) for r in made]
    result = plan_memory(alone, ALIGNMENT)
    assert result.live_peak == _sweep(alone) and result.taken_over == {}
    at_peak = sum(-(-r.nbytes // ALIGNMENT) * ALIGNMENT for r in alone if r.first <= result.peak_step <= r.last)
    assert at_peak == result.live_peak


def test_a_chain_of_in_place_results_needs_one_block() -> None:
    made = [Request(i, 100, i, i + 1, (i - 1,)) for i in range(50)]
    assert plan_memory(made, ALIGNMENT).peak == 128


def test_a_chain_without_in_place_needs_two_blocks() -> None:
    made = [Request(i, 100, i, i + 1) for i in range(50)]
    assert plan_memory(made, ALIGNMENT).peak == 256


def test_a_block_that_is_read_later_is_not_given() -> None:
    made = [Request("a", 64, 0, 2), Request("b", 64, 1, 2, ("a",)), Request("c", 64, 2, 3, ("a", "b"))]
    result = plan_memory(made, ALIGNMENT)
    assert result.taken_over == {"c": "a"} and result.offsets["b"] != result.offsets["a"]


def test_a_small_block_is_not_given_to_a_large_tensor() -> None:
    result = plan_memory([Request("a", 64, 0, 1), Request("b", 65, 1, 2, ("a",))], ALIGNMENT)
    assert result.taken_over == {}


def test_the_best_gap_is_used() -> None:
    made = [
        Request("a", 640, 0, 3), Request("keep", 64, 1, 9), Request("b", 128, 2, 3), Request("keep2", 64, 3, 9),
        Request("new", 100, 4, 9),
    ]  # fmt: skip
    result = plan_memory(made, ALIGNMENT)
    assert result.offsets["new"] == result.offsets["b"] and result.peak == result.total - 128


def test_of_equal_peaks_the_first_step_is_named() -> None:
    made = [Request("a", 64, 0, 0), Request("b", 128, 1, 1), Request("c", 64, 2, 2), Request("d", 128, 3, 3)]
    result = plan_memory(made, ALIGNMENT)
    assert (result.live_peak, result.peak_step) == (128, 1)


def test_nothing_asked_nothing_planned() -> None:
    assert plan_memory([], ALIGNMENT).peak == 0


@pytest.mark.parametrize("bug", ["overlap", "taken while needed", "dead too early"])
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge above is worth something: each of three wrong planners fails it."""
    made = [
        Request("a", 100, 0, 3),
        Request("b", 300, 1, 2, ("a",)),
        Request("c", 90, 1, 4, ("a",)),
        Request("d", 64, 3, 4),
    ]
    assert violations(made, plan_memory(made, ALIGNMENT)) == []
    if bug == "overlap":
        monkeypatch.setattr(plan, "_best_fit", lambda live, size: 0)
    elif bug == "taken while needed":
        monkeypatch.setattr(plan, "_can_give", lambda chain, key, size, step: True)
    else:
        made = [Request(r.key, r.nbytes, r.first, r.last) for r in made]
        short = [Request(r.key, r.nbytes, r.first, r.first) for r in made]
        assert violations(made, plan_memory(short, ALIGNMENT))
        return
    assert violations(made, plan_memory(made, ALIGNMENT))
