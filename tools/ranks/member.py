"""One rank: a process that does what all ranks do, and says something only if it is the first."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from graphrt import __version__
from graphrt.backend import numbered
from graphrt.errors import GraphrtError, RankError
from graphrt.ranks import Ranks, join, leave

#: What a verb does on every rank: its options and the prompt, and the exit code. A function of a module.
Generate = Callable[[argparse.Namespace, str], int]


def as_rank(args: argparse.Namespace, generate: Generate, prompt: str, rank: int, size: int, store: str = "") -> int:
    """Does what a verb does as one of several ranks. prompt: the first rank's is everyone's. Raises what the verb does,
    RankError where another rank is lost."""
    from graphrt.models import hub

    ranks = join(rank, size, store)
    try:
        versions = ranks.everyones(__version__)
        if len(set(versions)) > 1:
            raise RankError(f"all ranks must run one version of graphrt, they run {', '.join(versions)}; install one")
        _share_cores(args, ranks)
        args.backend = own_backend(args.backend, int(os.environ.get("LOCAL_RANK", rank)))
        first = (str(hub.resolve(args.model)), prompt) if rank == 0 else None  # one rank fetches a model
        args.model, prompt = ranks.told(first)
        args.as_ranks = ranks
        code = generate(args, prompt)
        if code == 0:
            ranks.told(None)  # nobody leaves while another still listens
        return code
    finally:
        leave()


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


def be_quiet() -> None:
    """Nothing more is printed, and Ctrl-C is the first rank's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (they live as long as the process)


def started(rank: int, size: int, folder: str, args: argparse.Namespace, generate: Generate, prompt: str) -> None:
    """What a rank's process runs when launch.py has started it; its error goes into a file in `folder`."""
    from graphrt.progress import shown_by
    from graphrt.tools.progress import on_stderr

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    errors = sys.stderr
    if rank:
        be_quiet()
    try:
        with shown_by(None if rank or args.json else on_stderr()):
            code = as_rank(args, generate, prompt, rank, size, str(Path(folder, "store")))
        sys.stdout.flush()
    except BaseException as error:  # whatever it is, the process that started this one says it
        if isinstance(error, KeyboardInterrupt):
            os._exit(130)
        known = isinstance(error, GraphrtError)
        text = str(error.args[0]) if known and error.args else f"{type(error).__name__}: {error}"
        said = {"text": text, "lost": isinstance(error, RankError) and error.lost, "known": known}
        Path(folder, f"{rank}.json").write_text(json.dumps(said))
        if not known and not rank:
            traceback.print_exc(file=errors)
        os._exit(2)
    os._exit(code)  # threads of a link that others have left would hold Python's own end up
