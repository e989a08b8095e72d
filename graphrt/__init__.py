"""graphrt: a tensor-graph runtime in the style of ggml.

Build a graph with the ops in `graphrt.ops`, prepare it on backends, run it many times:

    a = graphrt.new_input("f32", 4, 3, name="a")
    graph = graphrt.Graph(graphrt.ops.sqr(a))
    exe = graphrt.prepare(graph, "cpu")
    exe.write("a", values); exe.run(); exe.read(graph.outputs[0])

Or load a model and generate text with it:

    model = graphrt.load("smollm2-135m")          # a known name, hf:OWNER/REPO/FILE, or the path of a GGUF file
    model.chat([{"role": "user", "content": "Hello"}])
    for piece in model.generate("Once upon a time", n=64): print(piece.text, end="")
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from graphrt.arguments import checked
from graphrt.backend import Backend, get_backend, register_backend
from graphrt.dtypes import DType, dtype
from graphrt.errors import GraphrtError, ModelError
from graphrt.execute import Executable, prepare
from graphrt.graph import Graph
from graphrt.tensor import Tensor, new_input, new_tensor

if TYPE_CHECKING:
    from graphrt.models.model import Model

__version__ = "0.1.0"

__all__ = [
    "DType",
    "Executable",
    "Graph",
    "GraphrtError",
    "Tensor",
    "__version__",
    "dtype",
    "get_backend",
    "load",
    "new_input",
    "new_tensor",
    "prepare",
    "register_backend",
]


#: Subpackages, which come on first use: a bare `import graphrt` stays light.
_SUBPACKAGES = ("backends", "models", "ops", "testing", "tools")


@checked(ModelError)
def load(
    model: str | os.PathLike[str] | None = None,
    backend: str | Sequence[str | Backend] | Backend = "auto",
    *,
    exact: bool = False,
) -> Model:
    """A model, ready to generate text: graphrt.models.load() of a file that is fetched when it is not here yet.

    model: the path of a GGUF file, a known name ("smollm2-135m", "gemma3-270m"), "hf:OWNER/REPO/FILE", or None for the
    demo model; backend: a name, "auto" for the best usable one, an instance, or several, the preferred first; exact:
    only reference forms of the ops. Raises HubError, GGUFError, ArchError, BackendError, MemoryPlanError.
    """
    from graphrt.models import hub  # here alone does the runtime know of models, and only when it is called
    from graphrt.models.model import load as load_file

    return load_file(hub.resolve(None if model is None else os.fspath(model)), backend, exact=exact)


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBPACKAGES, "errors"})


def __getattr__(name: str) -> object:
    if name in _SUBPACKAGES:
        import importlib

        return importlib.import_module(f"graphrt.{name}")
    raise AttributeError(f"module 'graphrt' has no attribute {name!r}")
