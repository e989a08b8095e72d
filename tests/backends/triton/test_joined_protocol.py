"""How ranks write to each other in kernels/joined.py, gone through in all orders in which it can happen: no word is
taken for another round's, none is written over before its reader is done with it, and nobody waits for ever."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from support.joined_protocol import Protocol, Wrong, check

pytest.importorskip("triton")

from graphrt.backends.triton.kernels import joined, joined_flags
from graphrt.peers import LONGEST, ROWS, words, words_of_rows


class Number(int):
    """A number that stays one through a kernel's function, called as plain Python."""

    def __and__(self, other: int) -> Number:
        return Number(int(self) & int(other))

    def __mul__(self, other: int) -> Number:
        return Number(int(self) * int(other))

    def __add__(self, other: int) -> Number:
        return Number(int(self) + int(other))

    def to(self, _: object) -> Number:
        return self


def place(number: int, row: int, source: int, ranks: int) -> int:
    """Where the kernel has the words of a round."""
    return int(joined._place.fn(Number(number), row, source, ranks, ROWS, LONGEST))


def buffer(number: int) -> int:
    """Which buffer the kernel has for a round of that number."""
    return place(number, 0, 0, 2) // (ROWS * 2 * LONGEST)


class Address(int):
    """A pointer of a kernel's function, called as plain Python: elements of any type are counted in f32."""

    def __add__(self, other: int) -> Address:
        return Address(int(self) + int(other))

    def to(self, _: object) -> Address:
        return self


def test_flags_have_the_buffers_of_words() -> None:
    """Rows that travel as plain f32, and their flags, lie where words would, each in a place of its own."""
    rows = []
    for number in (1, 2, 3):
        for row in (0, 1, ROWS - 1):
            for source in (0, 1):
                p_row, p_flag = joined_flags._plain.fn(Address(0), Number(number), row, source, 2, ROWS, LONGEST)
                n = place(number, row, source, 2)
                assert p_row == 2 * words_of_rows(2) + n, "behind all words, of 8 bytes"
                assert p_flag == 3 * words_of_rows(2) + n // LONGEST and p_flag < 2 * words(2)
                rows.append((p_row, p_flag))
    assert len(set(rows)) == 12 and rows[0] == rows[12] != rows[6], "rounds 1 and 3 share a buffer"


#: Numbers of rounds that the checker counts to, before they begin anew as the kernel's do.
MOST = 4 + joined.MOST_ROUNDS.value % 2


def as_written(size: int, shots: tuple[int, ...], n_words: int = 1, most: int = MOST) -> Protocol:
    return Protocol(size, shots, n_words, most, buffer=buffer)


@pytest.mark.parametrize("shots", [1, 2])
def test_numbers_begin_anew(shots: int) -> None:
    assert check(as_written(2, (shots,) * 7)) > 100
    assert check(as_written(2, (shots,) * 5, 2)) > 100, "words of a row come one by one"


@pytest.mark.parametrize("shots", list(product((1, 2), repeat=5)), ids=str)
def test_rounds_in_one_shot_and_in_two(shots: tuple[int, ...]) -> None:
    """How many rows a step has decides that."""
    assert check(as_written(2, shots, most=2 * MOST)) > 100


def test_words_that_were_not_written_since_their_number_was_in_use() -> None:
    """What the kernel relies on: that each word is written once in two thousand million rounds. In two shots a rank
    that owns no row is told no part."""
    with pytest.raises(Wrong, match="in round 6 a word of round 2 is taken for its own"):
        check(as_written(2, (1, 1, 1, 2, 1, 1)))


@pytest.mark.parametrize("shots", [(1, 1, 1), (1, 2, 1), (2, 1, 2), (2,) * 6], ids=str)
def test_three_ranks(shots: tuple[int, ...]) -> None:
    assert check(as_written(3, shots, most=MOST if len(shots) == 6 else 2 * MOST)) > 500


#: What each of a row's programs does (joined.py: _after() holds what it tells back until it has read).
IN_PARTS = ("read", "tell", "wait")


@pytest.mark.parametrize(("n_words", "rounds"), [(2, 5), (3, 1)])
def test_a_row_of_several_programs(n_words: int, rounds: int) -> None:
    """Two, each of which tells its words, waits for all, and then stores over what the other one reads."""
    assert check(replace(as_written(2, (1,) * rounds, n_words), programs=2, order=IN_PARTS)) > 500


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"order": ("tell", "read", "wait")}, "stores over what another one of its rank has not read"),
        ({"buffer": lambda number: 0}, "is written over round"),
        ({"fits": lambda word, number: word != 0}, "is taken for its own"),
    ],
    ids=["told before it is read", "one buffer", "any number will do"],
)  # fmt: skip
def test_what_is_wrong_with_several_programs(broken: dict[str, Any], said: str) -> None:
    with pytest.raises(Wrong, match=said):
        check(replace(as_written(2, (1,) * 4, 2), **{"programs": 2, "order": IN_PARTS} | broken))


def test_places_are_apart() -> None:
    """Of both buffers, rows, and ranks that write; and the slots have room for all of them."""
    places = [place(number, row, source, 3) for number in (1, 2) for row in range(ROWS) for source in range(3)]
    starts = sorted(places)
    assert all(b - a >= LONGEST for a, b in zip(starts, starts[1:])) and starts[0] >= 0
    assert starts[-1] + LONGEST <= words(3)


ONE, TWO = Protocol(2, (1,) * 6), Protocol(2, (2,) * 6)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (replace(ONE, buffer=lambda number: 0), "is written over round"),
        (replace(ONE, size=3, shots=(1,) * 3, buffer=lambda number: 0), "is written over round"),
        (replace(ONE, fits=lambda word, number: word >= number), "is taken for its own"),
        (replace(ONE, fits=lambda word, number: word != 0), "is taken for its own"),
        (replace(ONE, fits=lambda word, number: word % 2 == number % 2), "is taken for its own"),
        (replace(ONE, most=2), "is taken for its own"),
        (replace(ONE, most=5), "is written over round"),
        (replace(ONE, clears=lambda number: (0, 1)), "ranks wait for ever"),
        (replace(TWO, shots=(2, 2, 2), waits=False), "is written over round"),
    ],
    ids=[
        "one buffer", "one buffer of three ranks", "later numbers will do", "any number will do",
        "parity for a number", "two numbers", "an odd number of numbers", "cleared too early",
        "nobody waits for the sum",
    ],
)  # fmt: skip
def test_what_is_wrong_is_found(broken: Protocol, said: str) -> None:
    with pytest.raises(Wrong, match=said):
        check(broken)


def test_two_shots_would_do_with_one_buffer() -> None:
    """An owner's sum tells that all are done with the round before; it is one shot that needs two."""
    assert check(replace(TWO, buffer=lambda number: 0)) > 100


def test_a_buffer_that_is_done_with_may_be_cleared() -> None:
    """That of the round that is over: nobody writes there before this rank has told its part of the next."""
    assert check(replace(ONE, clears=lambda number: (number & 1,))) > 100
