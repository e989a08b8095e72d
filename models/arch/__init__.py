"""The architectures: one file a family, found by the name that GGUF files give."""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING

from graphrt.errors import ArchError

if TYPE_CHECKING:
    from graphrt.models.arch.skeleton import Decoder

#: general.architecture -> module and class. A module is imported when a file asks for it.
ARCHITECTURES = {
    "llama": ("llama", "Llama"),
    "gemma3": ("gemma3", "Gemma3"),
}


def architecture(name: str) -> type[Decoder]:
    """The family of that name. Raises ArchError for an unknown one, with the nearest."""
    if name not in ARCHITECTURES:
        close = difflib.get_close_matches(name, ARCHITECTURES, 3, 0.4)
        nearest = f"; the nearest: {', '.join(close)}" if close else ""
        raise ArchError(
            f"the architecture must be one of {', '.join(ARCHITECTURES)}, the file says {name!r}{nearest}. "
            f"Use a model of a listed one, or add models/arch/<family>.py"
        )
    module, cls = ARCHITECTURES[name]
    found: type[Decoder] = getattr(importlib.import_module(f"graphrt.models.arch.{module}"), cls)
    return found
