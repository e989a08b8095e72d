"""graphrt: a tensor-graph runtime in the style of ggml.

Build a graph with the ops in `graphrt.ops`, prepare it on backends, run it many times:

    a = graphrt.new_input("f32", 4, 3, name="a")
    graph = graphrt.Graph(graphrt.ops.sqr(a))
    exe = graphrt.prepare(graph, "cpu")
    exe.write("a", values); exe.run(); exe.read(graph.outputs[0])

`graphrt.models.load(path)` loads a GGUF model and generates text with it.
"""

from graphrt.backend import get_backend, register_backend
from graphrt.dtypes import DType, dtype
from graphrt.errors import GraphrtError
from graphrt.execute import Executable, prepare
from graphrt.graph import Graph
from graphrt.tensor import Tensor, new_input, new_tensor

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
    "new_input",
    "new_tensor",
    "prepare",
    "register_backend",
]


def __getattr__(name: str) -> object:
    """`graphrt.ops`, `graphrt.models` and the rest on first use: a bare `import graphrt` stays light."""
    if name in ("ops", "models", "backends", "tools", "testing"):
        import importlib

        return importlib.import_module(f"graphrt.{name}")
    raise AttributeError(f"module 'graphrt' has no attribute {name!r}")
