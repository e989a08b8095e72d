"""--prompt-cache FILE: what a session holds after its prompt, on disk, for prompts that begin alike."""

from __future__ import annotations

import argparse
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from graphrt.tools.outputs import OutputFile

if TYPE_CHECKING:
    from graphrt.models.engine import SessionOptions
    from graphrt.models.model import Model, Piece
    from graphrt.models.session import Session
    from graphrt.ranks import Ranks


def add_argument(parser: argparse.ArgumentParser) -> None:
    what = "keep what the prompt leaves in this file, and read no more of a prompt than differs from what it holds"
    parser.add_argument("--prompt-cache", type=OutputFile, metavar="FILE", help=what)


def path_of(path: Path, ranks: Ranks | None) -> Path:
    """The file of this one of several ranks, which has its part of a cache."""
    if ranks is None:
        return path
    stages = f"-in-{ranks.stages}" if ranks.stages > 1 else ""
    return path.with_name(f"{path.name}.{ranks.rank}-of-{ranks.size}{stages}")


@dataclass(frozen=True)
class Start:
    """A session that a prompt goes on from. rest: the tokens that it is to be given; n_read: how many it will read;
    path: where it is kept after that, None where it is not or is already."""

    session: Session
    rest: list[int]
    n_read: int
    path: Path | None

    def saving(self, pieces: Iterator[Piece]) -> Generator[Piece, None, None]:
        """The same pieces; when the first comes, or none, the prompt has been read, and is written to the file. Raises
        SessionError where that is not possible."""
        path = self.path
        with closing(pieces):  # type: ignore[type-var]
            for piece in pieces:
                if path is not None:
                    self.session.save(path)
                    path = None
                yield piece
        if path is not None:
            self.session.save(path)


def start(model: Model, tokens: Sequence[int], options: SessionOptions, path: Path | None) -> Start:
    """A session for these tokens: that of the file, as far as it begins alike, else a new one. Raises SessionError for
    a file that this model and these options can't use."""
    if model.ranks is not None and path is not None:
        return _of_rank(model, model.ranks, tokens, options, path)
    if path is None or not path.exists():
        return Start(model.session(options), list(tokens), len(tokens), path)
    session = model.load_session(path, options)
    kept = session.tokens[: len(tokens)] == list(tokens)
    rest = session.keep_prefix(tokens)
    return Start(session, rest, len(tokens) - int(session.lengths[0]), None if kept else path)


def _of_rank(model: Model, ranks: Ranks, tokens: Sequence[int], options: SessionOptions, path: Path) -> Start:
    """The same over ranks: each has a file of its own beside `path`, with its part of the cache, and all keep as many
    tokens as the one that can keep the fewest."""
    mine = path_of(path, ranks)
    if not all(ranks.everyones(mine.exists())):
        return Start(model.session(options), list(tokens), len(tokens), mine)
    session = model.load_session(mine, options)
    alike = next(
        (i for i, (a, b) in enumerate(zip(session.tokens, tokens)) if a != b), min(session.n_past, len(tokens))
    )
    n = min(ranks.everyones(alike))
    session.rewind(min(n, len(tokens) - 1))
    rest = list(tokens[session.n_past :])
    return Start(session, rest, len(tokens) - int(session.lengths[0]), None if n == len(tokens) else mine)
