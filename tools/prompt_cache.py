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


def add_argument(parser: argparse.ArgumentParser) -> None:
    what = "keep what the prompt leaves in this file, and read no more of a prompt than differs from what it holds"
    parser.add_argument("--prompt-cache", type=OutputFile, metavar="FILE", help=what)


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
    if path is None or not path.exists():
        return Start(model.session(options), list(tokens), len(tokens), path)
    session = model.load_session(path, options)
    kept = session.tokens[: len(tokens)] == list(tokens)
    rest = session.keep_prefix(tokens)
    return Start(session, rest, len(tokens) - int(session.lengths[0]), None if kept else path)
