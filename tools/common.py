"""Options and output that several verbs share."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from graphrt.errors import SessionError

if TYPE_CHECKING:
    from graphrt.models.model import Model
    from graphrt.models.session import SessionOptions


def add_session_arguments(parser: argparse.ArgumentParser) -> None:
    """--backend, -c, -b, -ctk, -ctv, -t."""
    group = parser.add_argument_group("model")
    group.add_argument("--backend", default="auto", metavar="NAME", help="who runs it (default: the best usable one)")
    group.add_argument("-c", "--ctx-size", type=int, default=0, metavar="N", help="context (default: at most 4096)")
    group.add_argument("-b", "--batch-size", type=int, default=512, metavar="N", help="tokens at once (default: 512)")
    for side in "kv":
        flag, long = f"-ct{side}", f"--cache-type-{side}"
        group.add_argument(flag, long, default="f16", metavar="TYPE", help="f32, f16 (default), bf16, q8_0 or q4_0")
    group.add_argument("-t", "--threads", type=int, default=0, metavar="N", help="CPU threads (default: all cores)")


def load_model(args: argparse.Namespace, exact: bool) -> Model:
    """The model that `args.model` names, pulled if need be."""
    from graphrt.models import hub
    from graphrt.models.model import load

    if args.threads < 0:
        raise SessionError(f"the number of threads (-t) must be at least 1, got {args.threads}")
    if args.threads:
        import torch

        torch.set_num_threads(args.threads)
    return load(hub.resolve(args.model), args.backend, exact=exact)


def session_options(args: argparse.Namespace) -> SessionOptions:
    from graphrt.models.session import SessionOptions

    return SessionOptions(args.ctx_size, args.batch_size, args.cache_type_k, args.cache_type_v)


def read_text(path: str) -> str:
    """A text file, "-" for standard input. Raises SessionError when it can't be read."""
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SessionError(f"the file must be readable text, {path!r} is not: {reason}") from error


def print_json(value: object) -> None:
    print(json.dumps(value, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], out: TextIO = sys.stdout) -> None:
    """A plain table: the same on a terminal and in a pipe. Numbers are right-aligned."""
    cells = [[str(c) for c in row] for row in rows]
    widths = [max(len(c), *(len(row[i]) for row in cells)) if cells else len(c) for i, c in enumerate(columns)]
    right = [bool(rows) and all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(columns))]
    for line in [list(columns), *cells]:
        shown = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right)]
        print("  ".join(shown).rstrip(), file=out)


@contextmanager
def progress(title: str, total: int) -> Iterator[_Advance]:
    """A progress bar on stderr when that is a terminal; calling what it gives advances by one."""
    if not sys.stderr.isatty():
        yield _Advance(None)
        return
    from rich.console import Console  # well-kept, and copes with every terminal
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield _Advance(lambda: bar.advance(task))


class _Advance:
    def __init__(self, advance: object) -> None:
        self._advance = advance

    def __call__(self) -> None:
        if callable(self._advance):
            self._advance()


def human_bytes(n: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError
