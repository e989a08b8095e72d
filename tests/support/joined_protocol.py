"""A model of how ranks tell each other a row in backends/triton/kernels/joined.py, and a checker that goes through all
orders in which it can happen.

A rank is where it stands in its round; a word is (number, round, what), of which the kernel sees the number and a
value: `round` and `what` are kept to see that the value is the one that was meant. Rows don't touch each other, so
there is one. It may be several programs' of a rank, of which each tells its words, waits for all, and then stores over
what the others read. Stores are on their way until they arrive, in any order but for those to one word.

A rank reads its words all at once, when all are there, where the kernel asks for one after the other and for all again
if one is late. Nothing is lost by that: as soon as a word could be taken for what it is not, or is written over before
its reader's round is over, the checker says so; and a word that is neither is the same whenever it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

#: What a word stands for.
NOTHING, PART, SUM = 0, 1, 2


class Word(NamedTuple):
    """number: as the kernel counts rounds; round: which it really is, from 1; what: of the three above."""

    number: int = 0
    round: int = 0
    what: int = NOTHING


#: Where a word lies: whose memory, which buffer, who writes it, which of a row's words.
Place = tuple[int, int, int, int]
#: On its way there.
Store = tuple[Place, Word]


class Rank(NamedTuple):
    """round: which one it is in, from 1; done: how many of its actions each program has done; sent: stores that have
    not arrived, the oldest first."""

    round: int
    done: tuple[int, ...]
    sent: tuple[Store, ...] = ()


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    words: tuple[tuple[Place, Word], ...]  # in the order of places; those that were never written are left out


@dataclass(frozen=True)
class Protocol:
    """size: ranks; shots: of each round in turn, 1 or 2; n_words: of a row; most: the highest number of a round, behind
    which 1 follows; programs: of a rank's row, in one shot; order: what each does, of "read" (what the others store
    over), "tell" and "wait"; buffer: which buffer a round of that number has; fits: whether a word of one number is of
    the round of another; clears: which buffers a rank sets to 0 after a round, by its number; waits: a rank that is no
    owner waits for the sum."""

    size: int
    shots: tuple[int, ...]
    n_words: int = 1
    most: int = 4
    owner: int = 0
    programs: int = 1
    order: tuple[str, ...] = ("tell", "wait")
    buffer: Callable[[int], int] = field(default=lambda number: number & 1)
    fits: Callable[[int, int], bool] = field(default=lambda word, number: word == number)
    clears: Callable[[int], Sequence[int]] = field(default=lambda number: ())
    waits: bool = True

    def number(self, round: int) -> int:
        return (round - 1) % self.most + 1

    def place(self, memory: int, round: int, source: int, word: int) -> Place:
        return memory, self.buffer(self.number(round)), source, word

    def asked(self, rank: int, round: int) -> list[tuple[Place, int]]:
        """The places that a rank reads in a round, and what must be there."""
        sources: Sequence[int]
        if self.shots[round - 1] == 1 or rank == self.owner:
            sources, what = range(self.size), PART
        else:
            sources, what = (self.owner,) if self.waits else (), SUM
        return [(self.place(rank, round, s, w), what) for s in sources for w in range(self.n_words)]

    def told(self, rank: int, round: int, what: int, program: int = 0) -> tuple[Store, ...]:
        """The stores by which a rank's program tells its part, or an owner the sum."""
        word = Word(self.number(round), round, what)
        parts_to = [self.owner] if self.shots[round - 1] == 2 else range(self.size)
        peers = range(self.size) if what == SUM else parts_to
        own = range(program, self.n_words, self.programs)
        return tuple((self.place(peer, round, rank, w), word) for peer in peers for w in own)

    def begun(self, round: int, sent: tuple[Store, ...] = ()) -> Rank:
        """A rank that begins a round."""
        return Rank(round, (0,) * self.programs, sent)


class Wrong(Exception):
    """What a protocol may not do, and can."""


def check(protocol: Protocol) -> int:
    """Goes through all states that can be, and gives their number. Raises Wrong where a word is taken for one that it
    is not, is written over before its reader is done with it, or ranks wait for ever."""
    first = State((protocol.begun(1),) * protocol.size, ())
    seen, left = {first}, [first]
    while left:
        state = left.pop()
        ways = 0
        for after in _ways(protocol, state):
            ways += 1
            if after not in seen:
                seen.add(after)
                left.append(after)
        done = all(rank.round > len(protocol.shots) and not rank.sent for rank in state.ranks)
        if not ways and not done:
            raise Wrong(f"ranks wait for ever: {[rank.round for rank in state.ranks]}")
    return len(seen)


def _ways(protocol: Protocol, state: State) -> Iterator[State]:
    words = dict(state.words)
    for number, rank in enumerate(state.ranks):
        yield from _arriving(state, words, number, rank)
        if rank.round <= len(protocol.shots):
            yield from _going_on(protocol, state, words, number, rank)


def _arriving(state: State, words: dict[Place, Word], number: int, rank: Rank) -> Iterator[State]:
    """A store gets where it goes, unless an older one to the same word is on its way."""
    for i, (place, word) in enumerate(rank.sent):
        if any(place == older for older, _ in rank.sent[:i]):
            continue
        before, reader = words.get(place, Word()), state.ranks[place[0]]
        if before.round < word.round and before.round >= reader.round:
            raise Wrong(f"round {word.round} is written over round {before.round}, which its reader is not done with")
        left = rank._replace(sent=rank.sent[:i] + rank.sent[i + 1 :])
        yield _with(state, words | {place: word}, number, left)


def _going_on(protocol: Protocol, state: State, words: dict[Place, Word], number: int, rank: Rank) -> Iterator[State]:
    for program, done in enumerate(rank.done):
        if done == len(protocol.order):
            continue
        action, sent = protocol.order[done], rank.sent
        if action == "wait" and not _has_all(protocol, words, number, rank):
            continue
        if action == "wait" and any("read" in protocol.order[other:] for other in rank.done):
            raise Wrong(f"in round {rank.round} a program stores over what another one of its rank has not read")
        if action == "tell":
            sent += protocol.told(number, rank.round, PART, program)
        after = rank._replace(done=(*rank.done[:program], done + 1, *rank.done[program + 1 :]), sent=sent)
        if all(n == len(protocol.order) for n in after.done):
            yield _with(state, *_over(protocol, words, number, after))
        else:
            yield _with(state, words, number, after)


def _has_all(protocol: Protocol, words: dict[Place, Word], number: int, rank: Rank) -> bool:
    """All words that a program of a rank waits for are there."""
    late = False
    for place, what in protocol.asked(number, rank.round):
        word = words.get(place, Word())
        if not protocol.fits(word.number, protocol.number(rank.round)):
            late = True
        elif word.round != rank.round or word.what != what:
            raise Wrong(f"in round {rank.round} a word of round {word.round} is taken for its own")
    return not late


def _over(protocol: Protocol, words: dict[Place, Word], number: int, rank: Rank) -> tuple[dict[Place, Word], int, Rank]:
    """All programs of a rank have what they waited for: its round is over, and an owner tells the sum."""
    sent = rank.sent
    if protocol.shots[rank.round - 1] == 2 and number == protocol.owner:
        sent += protocol.told(number, rank.round, SUM)
    cleared = protocol.clears(protocol.number(rank.round))
    words = {place: Word() if place[0] == number and place[1] in cleared else word for place, word in words.items()}
    return words, number, protocol.begun(rank.round + 1, sent)


def _with(state: State, words: dict[Place, Word], number: int, rank: Rank) -> State:
    ranks = state.ranks[:number] + (rank,) + state.ranks[number + 1 :]
    return State(ranks, tuple(sorted(words.items())))
