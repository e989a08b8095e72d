"""What ranks do in tests/tools/test_rank_faults.py: each function is a rank's work in which the second one fails."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable

import torch

from graphrt import rank_watch
from graphrt.models.engine import SessionOptions
from graphrt.models.model import load
from graphrt.models.weights import Weights
from graphrt.ranks import Ranks

#: Looks of the watch, so that a test takes seconds.
LOOKS = 4


def ended() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped() -> None:
    while True:  # whoever lets it go on
        os.kill(os.getpid(), signal.SIGSTOP)


def loops() -> None:
    while True:
        pass


FAULTS: dict[str, Callable[[], None]] = {"ended": ended, "stopped": stopped, "loops": loops}


def work(args: argparse.Namespace, given: str) -> int:
    """Loads the model, reads a prompt, generates. given: the second rank's fault, and when it happens: "ended load 3",
    at the third tensor, "loops sum 5", when it comes to the fifth sum, of the prompt's, "ended sum 30" of a step's,
    "ended take 9" when a stage is to take what another one gives for the ninth time."""
    torch.set_num_threads(1)
    rank_watch.SILENT = rank_watch.ABSENT = LOOKS
    fault, where, at = given.split()
    if args.as_ranks.rank == 1:
        _plant(FAULTS[fault], where, int(at))
    model = load(args.model, "cpu", exact=True, ranks=args.as_ranks)
    session = model.session(SessionOptions(n_ctx=256))
    for token in model.generate(list(range(1, 30)), 200, temp=0.0, ignore_eos=True, session=session):
        assert token.token >= 0
    return 0


def _plant(fault: Callable[[], None], where: str, at: int) -> None:
    places = {"load": (Weights, "_held"), "sum": (Ranks, "summed"), "take": (Ranks, "take")}
    kind, name = places[where]
    real, count = getattr(kind, name), [0]

    def planted(*given: object) -> object:
        count[0] += 1
        if count[0] == at:
            fault()
        return real(*given)

    setattr(kind, name, planted)
