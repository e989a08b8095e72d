"""Environment variables: all that graphrt reads of its own, with the flag that every verb has for each."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """name: of the variable; flag: of the command line; metavar: of its value; meaning, default: in words."""

    name: str
    flag: str
    metavar: str
    meaning: str
    default: str

    def get(self) -> str | None:
        """Its value, None where it is not set or empty."""
        return os.environ.get(self.name) or None


CACHE = Variable(
    "GRAPHRT_CACHE", "--cache-dir", "FOLDER", "folder of fetched models and compiled kernels", "~/.cache/graphrt"
)
FUSE = Variable(
    "GRAPHRT_FUSE", "--fuse", "NAMES",
    "fusions of the GPU backend: 0 for none, or names with commas for these only (backends/triton/fuse.py)", "all",
)  # fmt: skip
KEEP_WEIGHTS = Variable(
    "GRAPHRT_KEEP_WEIGHTS", "--keep-weights", "SIZE",
    "weights that a step of training may keep in f16 on the GPU, such as 16G, 0 for none", "0",
)  # fmt: skip
KERNEL_CACHE = Variable(
    "GRAPHRT_KERNEL_CACHE", "--kernel-cache", "FOLDER", "folder of compiled CPU kernels, 0 for none",
    "kernels in the folder above",
)  # fmt: skip


def cache_folder(name: str) -> str | None:
    """A folder inside the one that GRAPHRT_CACHE names, None where it names none."""
    folder = CACHE.get()
    return None if folder is None else os.path.join(folder, name)


VARIABLES = (CACHE, FUSE, KEEP_WEIGHTS, KERNEL_CACHE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flag of each variable."""
    group = parser.add_argument_group("settings that the environment may give too")
    for v in VARIABLES:
        group.add_argument(v.flag, dest=v.name, metavar=v.metavar, help=f"{v.meaning} ({v.name}; default: {v.default})")


def apply(args: argparse.Namespace) -> None:
    """Sets the variables whose flags were given, for this process and those that it starts."""
    for v in VARIABLES:
        value = vars(args).pop(v.name)
        if value is not None:
            os.environ[v.name] = value


def table() -> list[tuple[str, str, str, str]]:
    """Rows of name, flag, meaning and default."""
    return [(v.name, f"{v.flag} {v.metavar}", v.meaning, v.default) for v in VARIABLES]
