"""Files that a verb writes are told apart from those that it reads, and looked at before the work, not after it."""

from __future__ import annotations

import argparse
import os
import re
from contextlib import suppress
from pathlib import Path

from graphrt.errors import SessionError
from graphrt.tools.common import check_writable

#: Arguments that are texts, whatever files are called.
_TEXTS = ("prompt", "system")


class OutputFile(str):
    """An argparse type: the name of a file that a verb writes."""


def check_outputs(args: argparse.Namespace) -> None:
    """Raises SessionError where a file to write can't be written, and where the command line names it for something
    else as well: what is read would be lost."""
    given = [(flag, text) for flag, value in vars(args).items() if flag not in _TEXTS for text in _each(value)]
    for i, (flag, output) in enumerate(given):
        if not isinstance(output, OutputFile):
            continue
        check_writable(output)
        if _is_device(output):
            continue
        for j, (other, text) in enumerate(given):
            if i != j and _names(text, output):
                raise SessionError(
                    f"a file to write must have a name of its own, {flag} and {other} are both {str(output)[:200]!r}; "
                    f"give another"
                )


def _each(value: object) -> list[str]:
    """The texts and paths of an argument, which may be given several times."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v if isinstance(v, str) else str(v) for v in values if isinstance(v, (str, Path))]


def _is_device(path: str) -> bool:
    """What may be written by several at once, as /dev/null."""
    return os.path.exists(path) and not os.path.isfile(path)


def _names(text: str, output: str) -> bool:
    """Whether an argument names a file to write: by itself, or as script.py:build, cpu,model=FILE and the like do."""
    return any(_same(part, output) for part in (text, *re.split("[,=:]", text)) if part)


def _same(path: str, other: str) -> bool:
    with suppress(OSError, ValueError):  # ValueError: a NUL
        if os.path.exists(path) and os.path.exists(other):
            return os.path.samefile(path, other)
        return isinstance(path, OutputFile) and os.path.realpath(path) == os.path.realpath(other)
    return False
