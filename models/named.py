"""graphrt.load(): a model by name or path."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from graphrt.arguments import checked
from graphrt.backend import Backend
from graphrt.errors import ModelError
from graphrt.models import hub
from graphrt.models.model import Model
from graphrt.models.model import load as load_file


@checked(ModelError)
def load(
    model: str | os.PathLike[str] | None = None,
    backend: str | Sequence[str | Backend] | Backend = "auto",
    *,
    exact: bool = False,
    **more: Any,
) -> Model:
    """A model, ready to generate text: graphrt.models.load() of a file that is fetched when it is not here yet.

    model: the path of a GGUF file, a known name ("smollm2-135m", "gemma3-270m"), "hf:OWNER/REPO[:QUANT]",
    "hf:OWNER/REPO/FILE", or None for the demo model; backend: a name, "auto" for the best usable one, an instance, or
    several, the preferred first; exact: only reference forms of the ops; more: as graphrt.models.load() has it. Raises
    HubError, GGUFError, ArchError, BackendError, MemoryPlanError.
    """
    return load_file(hub.resolve(None if model is None else os.fspath(model)), backend, exact=exact, **more)
