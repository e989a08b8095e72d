"""--lora and --lora-scaled, of the verbs that generate text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from graphrt.errors import SessionError

if TYPE_CHECKING:
    from graphrt.models.model import Model


def add_adapter_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("adapters")
    plain = "a LoRA adapter in a GGUF file, and a name for it (default: the file's name); may be repeated"
    group.add_argument("--lora", action="append", default=[], metavar="FILE[=NAME]", help=plain)
    scaled = "the same, its part of results times SCALE"
    group.add_argument("--lora-scaled", action="append", default=[], metavar="FILE[=NAME]:SCALE", help=scaled)


def use_adapters(model: Model, args: argparse.Namespace) -> None:
    """Has the model have those that a verb was given, if it has such flags. Raises SessionError, GGUFError."""
    given = [(text, 1.0) for text in getattr(args, "lora", ())]
    given += [_scaled(text) for text in getattr(args, "lora_scaled", ())]
    files, scales = dict[str, str](), list[float]()
    for text, scale in given:
        path, separator, name = text.rpartition("=")
        if not separator:
            path, name = text, Path(text).stem
        if not name or name in files:
            raise SessionError(f"adapters must have names of their own, got {text[:80]!r}; give --lora FILE=NAME")
        files[name] = path
        scales.append(scale)
    if files:
        model.use_adapters(files, [0.0] * len(scales) if getattr(args, "lora_init_without_apply", False) else scales)


def _scaled(text: str) -> tuple[str, float]:
    path, _, scale = text.rpartition(":")
    try:
        return path, float(scale)
    except ValueError:
        raise SessionError(f"--lora-scaled must be FILE:SCALE, as a.gguf:0.5, got {text[:80]!r}") from None
