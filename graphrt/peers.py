"""Memory that GPUs of one host share, through torch's symmetric memory: where ranks write to each other in a kernel.

Each rank has slots that all others can write, and a table of all ranks' slots by address. A slot takes one f32 beside
the number of the round that it was written in, in one word of 64 bits: whoever reads a word with the number of its own
round has the value, so that there is neither a flag to wait for nor a fence. Where many rows are told, half of the
bytes count more than a wait: those rows travel as plain f32, and behind each a flag, the number of its round.
backends/triton/kernels/joined.py and joined_flags.py are what writes and reads them; tests/support/joined_protocol.py
goes through all orders in which that can happen. Numbers of rounds begin anew after 2**31 - 2: a word that nobody wrote
in all that time would be believed.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Members(Protocol):
    """What is asked of graphrt.ranks.Ranks."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def group(self) -> Any: ...
    def everyones(self, value: Any) -> list[Any]: ...


#: Rows of a tensor that have slots, elements of the longest row, and parts of a row, each a program's, at most.
ROWS, LONGEST, SPLITS = 64, 8192, 16


@dataclass(frozen=True, eq=False)
class Peers:
    """slots: this rank's, i64 [words(size)]: of odd and even rounds, for each row what each rank has written, as words
    [2, ROWS, size, LONGEST], behind them as plain f32 of that shape, and then the flags, i32 [2, ROWS, size]; table:
    addresses of all ranks' slots, i64 [size]; rounds: how many each row has had, i32 [ROWS, SPLITS], which each of its
    programs counts for itself. hold: what must live as long."""

    rank: int
    size: int
    slots: torch.Tensor
    table: torch.Tensor
    rounds: torch.Tensor
    hold: Any = None


def words(size: int) -> int:
    """Words of 64 bits of a rank's slots: the rows as words, as plain f32, and their flags."""
    rows = words_of_rows(size)
    return rows + rows // 2 + ROWS * size


def words_of_rows(size: int) -> int:
    """Of these, the first: where rows are told as words."""
    return 2 * ROWS * size * LONGEST


def shared_by(ranks: Members) -> Peers | str:
    """The memory that these ranks share, each with a GPU of its own, torch's current device; or, on all of them, a
    sentence why there is none. All of them ask at once. Raises RankError where one is lost."""
    import torch

    own = torch.cuda.current_device()
    places: list[tuple[str, int]] = ranks.everyones((socket.gethostname(), own))
    reasons: list[str] = [reason for reason in ranks.everyones(_why_not(places, own)) if reason]
    if reasons:
        return reasons[0]
    made: Peers | str = _made(ranks)
    # Zeros must be there before another rank writes, and all ranks must have what they write to.
    failed: list[str] = [each for each in ranks.everyones(made if isinstance(made, str) else "") if each]
    return failed[0] if failed else made


def _why_not(places: list[tuple[str, int]], own: int) -> str:
    """Why the GPUs at these places, host and number, can't share memory with this rank's, "" if they can."""
    import torch

    if len({host for host, _ in places}) > 1:
        return "the ranks are on several hosts"
    if torch.version.hip is not None:
        return "symmetric memory has been made for NVIDIA's GPUs alone"
    others = [number for _, number in places if number != own]
    if len(others) < len(places) - 1:
        return "two ranks have one GPU"
    alone = [n for n in others if not torch.cuda.can_device_access_peer(own, n)]
    return f"GPU {own} can't reach the memory of GPU {alone[0]}" if alone else ""


def _made(ranks: Members) -> Peers | str:
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    group: Any = ranks.group or dist.group.WORLD
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        slots: torch.Tensor = symmetric.empty(words(ranks.size), dtype=torch.int64, device=device)
        slots.zero_()
        torch.cuda.synchronize()
        handle = symmetric.rendezvous(slots, group)
        table = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=slots.device)
    except (RuntimeError, ImportError, AttributeError, TypeError) as error:
        first = str(error).strip().partition("\n")[0][:200]
        return f"torch's symmetric memory is not to be had ({first or type(error).__name__})"
    rounds = torch.zeros(ROWS, SPLITS, dtype=torch.int32, device=slots.device)
    return Peers(ranks.rank, ranks.size, slots, table, rounds, handle)
