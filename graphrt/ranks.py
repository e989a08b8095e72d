"""Ranks: processes that run one graph together, and what they tell each other.

torch.distributed is what carries it: gloo between CPUs, NCCL between GPUs, by the same calls. Sums have one order,
that of ranks, so that every rank has the same bits, run after run: a library's own reductions promise no order, hence
bytes are moved by the library and added up here.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrt import rank_watch
from graphrt.errors import RankError
from graphrt.peers import Peers, shared_by
from graphrt.presence import here
from graphrt.rank_watch import Fault, Folder, Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

#: Up to so many bytes every rank gets all parts and adds them up; of more it adds up a piece, and pieces are handed on.
ONE_SHOT = 64 << 10
#: Tensors that a rank has sent and others have not taken yet: what it may be ahead.
MOST_SENT = 8
#: Seconds after which torch gives a rank up that does not come. The watch of the ranks (rank_watch.py) is earlier; one
#: that ends is noticed at once. The first rank may have nothing to say for as long as it likes.
ANSWERING = 7 * 24 * 3600


@dataclass(frozen=True)
class Ranks:
    """This process's place among `size` ranks: its number, from 0. group: torch's, None for the default one; stages:
    of a pipeline, each of size // stages ranks that follow each other; ep: each has some of a model's experts whole,
    and not a part of every one."""

    rank: int
    size: int
    group: Any = None
    stages: int = 1
    ep: bool = False

    def gathered(self, part: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Every rank's part, in their order: [..., n], of which n is sizes[rank]. Raises RankError."""
        import torch
        import torch.distributed as dist

        lead, most = part.shape[:-1], max(sizes)
        mine = part if part.shape[-1] == most else torch.nn.functional.pad(part, (0, most - part.shape[-1]))
        found = [part.new_empty(*lead, most) for _ in sizes]
        with _told():
            dist.all_gather(found, mine.contiguous(), group=self.group)
        return [each[..., :n] for each, n in zip(found, sizes)]

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in their order, in the part's type. Raises RankError."""
        if part.numel() * part.element_size() <= ONE_SHOT:
            return in_order(self.gathered(part, [part.shape[-1]] * self.size))
        import torch
        import torch.distributed as dist

        flat = part.reshape(-1)
        n = -(-flat.numel() // self.size)
        missing = n * self.size - flat.numel()
        padded = (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).contiguous()
        pieces, whole = torch.empty_like(padded), torch.empty_like(padded)
        with _told():
            dist.all_to_all_single(pieces, padded, group=self.group)  # each rank's part of this rank's piece
            mine = in_order(list(pieces.view(self.size, n)))
            dist.all_gather(list(whole.view(self.size, n)), mine, group=self.group)
        return whole[: flat.numel()].view(part.shape)

    def into(self, parts: torch.Tensor, own: torch.Tensor) -> None:
        """Every rank's elements in their order, parts: [size, n], own: [n]; queued where these lie on a GPU, and
        captured there. Raises RankError."""
        import torch.distributed as dist

        with _told():
            dist.all_gather_into_tensor(parts.view(-1), own, group=self.group)

    def swapped(self, pieces: torch.Tensor, own: torch.Tensor) -> None:
        """Of each rank's elements, own: [size * n], this rank's piece, pieces: [size, n]; as into() otherwise."""
        import torch.distributed as dist

        with _told():
            dist.all_to_all_single(pieces.view(-1), own, group=self.group)

    def give(self, part: torch.Tensor, other: int) -> None:
        """Sends a rank this tensor, any plain type and shape, which may change afterwards: a GPU's is queued there, a
        CPU's is sent from a copy while this rank goes on. Raises RankError."""
        import torch
        import torch.distributed as dist

        with _told():
            if part.is_cuda:
                dist.send(part, other, group=self.group)
                return
            while len(_sending) >= MOST_SENT:
                _sending.popleft()[0].wait()
            copy = part.clone(memory_format=torch.contiguous_format)
            _sending.append((dist.isend(copy, other, group=self.group), copy))

    def take(self, into: torch.Tensor, other: int) -> torch.Tensor:
        """What that rank has sent, of the type and shape of `into`, in the order in which it sends. Raises
        RankError."""
        import torch.distributed as dist

        with _told():
            dist.recv(into, other, group=self.group)
        return into

    def told(self, value: Any) -> Any:
        """What rank 0 says, on every rank; others' values are left aside. Raises RankError."""
        import torch.distributed as dist

        box = [value]
        with _told(needs_all=False):
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def everyones(self, value: Any) -> list[Any]:
        """What each rank says, on every rank. Raises RankError."""
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        with _told():
            dist.all_gather_object(found, value, group=self.group)
        return found


def in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of some tensors, the first two first: the one order that ranks add up in."""
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total = total + part
    return total


@contextmanager
def _told(*, needs_all: bool = True) -> Iterator[None]:
    """A failure of torch's link as an error of ours: another rank is gone, or does not answer. needs_all: False where
    ranks wait for the first one alone."""
    try:
        with here.meeting(needs_all=needs_all):
            yield
    except RuntimeError as error:  # what torch.distributed raises, DistBackendError among it
        first = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        lost = RankError(f"every rank must answer, one has not ({first}); see what it said, and start all again")
        lost.lost = True
        raise lost from error


def current(size: int = 0) -> Ranks:
    """This process's place in torch's process group. size: of a node that so many ranks meet at, which are those of
    this process's stage; 0 for all ranks of the job. Raises RankError where there is no group, or one of another
    size."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise RankError(
            f"a node that {size or 'several'} ranks meet at needs a process group, this process is in none; start the "
            f"ranks with --tp or torchrun, or play them in one process (graphrt.ops.linked)"
        )
    if not size:
        return Ranks(dist.get_rank(), dist.get_world_size(), stages=_stages[-1] if _stages else 1)
    ranks = _own_stage[-1] if _own_stage else Ranks(dist.get_rank(), dist.get_world_size())
    if ranks.size != size:
        raise RankError(f"the graph is cut for {size} ranks, the process group has {ranks.size}; start {size}")
    return ranks


def in_environment() -> bool:
    """torchrun, or what speaks as it does, has started this process as one of several ranks."""
    there = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    return there and os.environ["WORLD_SIZE"] not in ("", "0", "1")


def join(
    rank: int, size: int, folder: str = "", ended: Callable[[Fault], None] | None = None, *, gpus: bool = False,
    stages: int = 1,
) -> Ranks:  # fmt: skip
    """Makes this process one of `size` ranks, which are `stages` stages of a pipeline, a divisor of it. folder: a
    private one on a disk that all of them see, where they find each other; "" for the address that torchrun has set.
    ended: called from a thread when another rank hangs, while this one may wait for it in a call that nothing else
    ends; None for no watch. gpus: each has one of its own, torch's current device, and they are linked too, by NCCL.
    Raises RankError where they don't find each other, or have other stages."""
    import torch.distributed as dist

    how: dict[str, Any] = {"init_method": f"file://{folder}/store"} if folder else {}
    try:
        kinds = "cpu:gloo,cuda:nccl" if gpus else "gloo"
        dist.init_process_group(kinds, rank=rank, world_size=size, timeout=timedelta(seconds=ANSWERING), **how)
    except (RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[0][:200]
        raise RankError(f"{size} ranks must find each other, rank {rank} did not ({first}); start all again") from error
    ranks = Ranks(rank, size, stages=stages)
    everyones = ranks.everyones(stages)
    if len(set(everyones)) > 1:
        raise RankError(
            f"all ranks must be divided into as many stages, got {everyones}, rank by rank; give all one --pp"
        )
    if stages > 1:
        _divide(ranks)
    _gpus.extend([rank] if gpus else [])
    if ended is not None:
        board = Folder(Path(folder)) if folder else torchrun_store(rank_watch.SILENT)
        watch = Watch(rank, size, board, ended, os.environ.get("TORCHELASTIC_RESTART_COUNT", ""))
        watch.beat()
        ranks.everyones(None)  # everyone's first beat is there
        watch.start()
        _watches.append(watch)
    if gpus:
        own = _own_stage[-1] if _own_stage else ranks
        _shared.append(shared_by(own) if own.size > 1 else "a stage of one rank has nothing to join")
    return ranks


#: This process's, while it is a rank; and its number, while ranks are linked over GPUs.
_watches: list[Watch] = []
_gpus: list[int] = []
#: While ranks are linked over GPUs: what those of this one's stage share, or why they share none.
_shared: list[Peers | str] = []
#: While this process is a rank of a pipeline: how many stages there are, and its place among those of its own.
_stages: list[int] = []
_own_stage: list[Ranks] = []
#: What is being sent by a CPU, the oldest first, and the memory that it is sent from.
_sending: deque[tuple[Any, Any]] = deque()


def _divide(ranks: Ranks) -> None:
    """A group of torch's for each stage of several ranks; all ranks make all of them."""
    import torch.distributed as dist

    each = ranks.size // ranks.stages
    _stages.append(ranks.stages)
    groups = [
        dist.new_group(list(range(first, first + each))) if each > 1 else None for first in range(0, ranks.size, each)
    ]
    _own_stage.append(Ranks(ranks.rank % each, each, groups[ranks.rank // each]))


def link_gpus() -> bool:
    """This process is one of several ranks whose GPUs have a link."""
    return bool(_gpus)


def peers(size: int) -> Peers | str:
    """The memory that GPUs of this process's stage, of `size` ranks, share, or a sentence why they share none."""
    found = _shared[-1] if _shared else "the ranks have no link between their GPUs (NCCL)"
    return (
        f"the process group has other ranks than {size}" if isinstance(found, Peers) and found.size != size else found
    )


def torchrun_store(seconds: float) -> Any:
    """The store whose address torchrun has set, by a connection of its own: one that waits for a key is taken. Raises
    RuntimeError where it does not answer for so long."""
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=False, timeout=timedelta(seconds=seconds)
    )


def leave() -> None:
    """This process is no rank any more."""
    import torch.distributed as dist

    while _watches:
        _watches.pop().stop()
    for known in (_gpus, _shared, _stages, _own_stage, _sending):
        known.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
