"""One rank: a process that does what all ranks do, and says something only if it is the first."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphrt import __version__
from graphrt.backend import numbered
from graphrt.env import FUSE
from graphrt.errors import GraphrtError, RankError
from graphrt.rank_watch import Fault
from graphrt.ranks import Ranks, join, leave
from graphrt.tools.ranks.keyboard import StandardInput

#: What a rank's process ends with where a verb's code is no (1), or that something could not be done (2): Python ends
#: with the one where it can't even start, and a rank that fails with the other.
OWN_CODES = {1: 101, 2: 102}
#: Options in which ranks may differ: of their hosts, and what the first rank tells the others.
OWN = ("model", "prompt", "file", "threads", "threads_batch")
#: The file, in the ranks' folder, that says that a server answers.
SERVES = "serves"
#: What a verb does on every rank: its options and the prompt, and the exit code. A function of a module.
Generate = Callable[[argparse.Namespace, str], int]

#: What is done, given the reason, before this process ends since another rank hangs.
last_words: list[Callable[[str], None]] = []


def as_rank(
    args: argparse.Namespace, generate: Generate, prompt: str, place: tuple[int, int], ended: Callable[[Fault], None],
    folder: str = "", failed: Callable[[BaseException], None] = lambda error: None,
) -> int:  # fmt: skip
    """Does what a verb does as one of several ranks. prompt: the first rank's is everyone's; place: this one's number
    and how many there are; ended, folder: as graphrt.ranks.join() has them; failed: called with an error while the
    other ranks don't know of it yet. Raises what the verb does, RankError where another rank is lost."""
    rank, size = place
    local = int(os.environ.get("LOCAL_RANK", rank))
    asked = _options(args)
    gpus = _takes_gpu(args.backend, local)
    args.backend = own_backend(args.backend, local)
    ranks = join(rank, size, folder, ended, gpus=gpus, stages=getattr(args, "pp", 1))
    try:
        versions = ranks.everyones(__version__)
        if len(set(versions)) > 1:
            raise RankError(f"all ranks must run one version of graphrt, they run {', '.join(versions)}; install one")
        _check_options(ranks.everyones(asked))
        _share_cores(args, ranks)
        args.asked = args.model
        args.model, prompt = ranks.told((_model(args), prompt) if rank == 0 else None)
        args.as_ranks = replace(ranks, ep=getattr(args, "ep", False))
        code = generate(args, prompt)
        if code in (0, *OWN_CODES):
            ranks.told(None)  # nobody leaves while another still listens
        return code
    except BaseException as error:
        failed(error)
        raise
    finally:
        leave()


def _options(args: argparse.Namespace) -> dict[str, str]:
    """What a command line says, spelled out, but for what is each rank's own; and which fusions there are: ranks with
    others would meet in other calls."""
    plain = (str, int, float, bool, list, tuple, type(None))
    said = {key: repr(value) for key, value in vars(args).items() if key not in OWN and isinstance(value, plain)}
    return said | {FUSE.flag: FUSE.get() or FUSE.default}


def _check_options(everyones: Sequence[Mapping[str, str]]) -> None:
    """Raises RankError where torchrun was started with other options on another host: ranks would not meet."""
    first = everyones[0]
    for rank, said in enumerate(everyones):
        other = next((key for key in [*first, *said] if first.get(key) != said.get(key)), None)
        if other is not None:
            raise RankError(
                f"all ranks must have the same options, {other} is {first.get(other, 'absent')[:80]} on rank 0 and "
                f"{said.get(other, 'absent')[:80]} on rank {rank}; start all alike"
            )


def _model(args: argparse.Namespace) -> str | None:
    """The file of the model that the options name, which one rank fetches; None for one that is made up."""
    from graphrt.models import hub

    return None if getattr(args, "synthetic", None) else str(hub.resolve(args.model))


def _share_cores(args: argparse.Namespace, ranks: Ranks) -> None:
    """Ranks of one host share its cores, unless -t says how many each has."""
    from graphrt.backends.cpu import threads

    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))
    if args.threads <= 0:
        args.threads = max(1, threads.count() // here)


def own_backend(name: str, local_rank: int) -> str:
    """The backend of a rank, the local_rank-th of its host: the device of that number where one is named without. Left
    to choose, ranks run on the CPU: over several GPUs nothing has been measured yet."""
    if name == "auto":
        return "cpu"
    return name if name == "cpu" or ":" in name else numbered(name, local_rank)


def _takes_gpu(name: str, local_rank: int) -> bool:
    """Whether each rank has a GPU of its own for the backend of that name; then this one's is torch's current one from
    now on. Ranks that are given a number share a GPU, over which NCCL has no link."""
    import torch
    import torch.distributed as dist

    if name in ("auto", "cpu") or ":" in name or not dist.is_nccl_available():
        return False
    if local_rank >= torch.cuda.device_count():
        return False
    torch.cuda.set_device(local_rank)
    return True


def be_quiet() -> None:
    """Nothing more is printed, and Ctrl-C is the first rank's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (they live as long as the process)


def started(rank: int, size: int, folder: str, args: argparse.Namespace, generate: Generate, prompt: str) -> None:
    """What a rank's process runs when launch.py has started it; its error goes into a file in `folder`."""
    from graphrt.progress import shown_by
    from graphrt.tools.progress import on_stderr

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    errors, out = sys.stderr, Path(folder, f"{rank}.json")

    args.on_ready = Path(folder, SERVES).touch

    def ended(fault: Fault) -> None:
        _say(out, {"text": fault.text, "lost": False, "rank": fault.rank})
        end_since(fault, size)

    typed: StandardInput | None = getattr(args, "standard_input", None)
    if typed is not None:
        typed.close() if rank else typed.take()
    if rank:
        be_quiet()
    try:
        with shown_by(None if rank or getattr(args, "json", False) else on_stderr()):
            code = as_rank(args, generate, prompt, (rank, size), ended, folder)
        sys.stdout.flush()
    except BaseException as error:  # whatever it is, the process that started this one says it
        if isinstance(error, KeyboardInterrupt):
            os._exit(130)
        _say(out, {"text": reason_of(error), "lost": isinstance(error, RankError) and error.lost, "rank": rank})
        if not isinstance(error, GraphrtError) and not rank:
            traceback.print_exc(file=errors)
        os._exit(2)
    os._exit(OWN_CODES.get(code, code))  # threads of a link that others have left would hold Python's own end up


def reason_of(error: BaseException) -> str:
    """For people: what ends a rank."""
    if isinstance(error, MemoryError):
        return "its host has no memory left for it; give it more, or cut the model over more ranks"
    known = isinstance(error, GraphrtError) and error.args
    return str(error.args[0]) if known else f"{type(error).__name__}: {error}"


def _say(path: Path, said: dict[str, Any]) -> None:
    """Leaves the reason of an end where launch.py looks for it; the first one counts."""
    with contextlib.suppress(FileExistsError), open(path, "x") as out:
        out.write(json.dumps(said))


def end_since(fault: Fault, size: int) -> None:
    """The rank's own thread may wait for another one in a call that nothing else ends."""
    for say in last_words:
        say(f"{named(fault.rank, size)}{fault.text}")
    os._exit(2)


def named(rank: int, size: int) -> str:
    """How an error begins that is a rank's, "" for -1, which is nobody's alone."""
    return f"rank {rank} of {size}: " if rank >= 0 else ""
