"""What ranks do in tests/tools/chat/test_chat_ranks.py: a conversation that Ctrl-C stops at many places."""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from graphrt.execute import Executable
from graphrt.models import Model, load
from graphrt.models.engine import AnyEngine
from graphrt.models.session import Session
from graphrt.tools.chat.rank_reader import LeadingReader, follow
from support.talks import answer, talk

#: Where Ctrl-C comes: in that call of a method, and how many tokens of the answer there are then. Steps read a batch of
#: the prompt, of which there are three, or a token. Where the host chooses tokens, and where steps choose all but the
#: first.
PRESSED: dict[str, list[tuple[type, str, int, int]]] = {
    "host": [
        (Model, "next_token", 3, 4), (Session, "step", 0, 0), (Session, "step", 1, 0), (Session, "step", 8, 7),
        (Model, "next_token", 0, 1),
    ],
    "ahead": [(Executable, "run", 0, 0), (Executable, "run", 8, 7), (Model, "next_token", 0, 1)],
}  # fmt: skip
#: Questions that begin differently, so that nothing of them is held, each of several batches.
QUESTIONS, N_BATCH = [f"{first} " + "the sea hello " * 4 for first in "abcde"], 16
#: Tokens of an answer that nothing stops.
PREDICT = 9


def work(args: argparse.Namespace, path: str) -> int:
    """The first rank writes what conversation() found to a file."""
    torch.set_num_threads(1)
    name = Path(path).name
    if name == "host":
        AnyEngine.runs_ahead = property(lambda engine: False)  # type: ignore[assignment]
    model = load(args.model, "cpu", exact=True, ranks=args.as_ranks)
    session = talk(model, n_batch=N_BATCH).session
    if args.as_ranks.rank:
        if name == "other tokens":
            session.unread = [5]
        follow(args.as_ranks, model, session)
        return 0
    found = conversation(model, LeadingReader(model, session, args.as_ranks), PRESSED.get(name, PRESSED["host"]))
    Path(path).write_text(json.dumps(found))
    args.as_ranks.told(None)
    return 0


def conversation(
    model: Model, reader: LeadingReader, places: Sequence[tuple[type, str, int, int]]
) -> list[dict[str, Any]]:
    """A question whose answer is stopped, and one whose answer is not, for each place."""
    talked, found = talk(model, predict=PREDICT, session=reader.session, reader=reader), []
    for place, question in zip(places, QUESTIONS):
        talked.clear()
        for stops in (True, False):
            before = [[turn.question, turn.answer] for turn in talked.turns]
            with pressed(*place[:3]) if stops else nullcontext():
                text = answer(talked, question)
            last = talked.answers[-1]
            figures = {"n_made": last.n_made, "n_past": talked.session.n_past, "n_prompt": last.n_prompt}
            found.append({"before": before, "question": question, "text": text, "ended": last.ended} | figures)
    return found


@contextmanager
def pressed(owner: type, name: str, at: int) -> Iterator[None]:
    """Sends this process Ctrl-C in the at-th call of a method."""
    method, calls = getattr(owner, name), iter(range(10**6))

    def interrupted(*args: Any, **how: Any) -> Any:
        if next(calls) == at:
            os.kill(os.getpid(), signal.SIGINT)
        return method(*args, **how)

    setattr(owner, name, interrupted)
    try:
        yield
    finally:
        setattr(owner, name, method)
