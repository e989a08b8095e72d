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

from graphrt import library_settings

TYPE_CHECKING = False  # type checkers know it by its name; importing typing would take longer than all of this

if TYPE_CHECKING:
    from graphrt.backend import get_backend, register_backend
    from graphrt.dtypes import DType, dtype
    from graphrt.errors import GraphrtError
    from graphrt.execute import Executable, prepare
    from graphrt.graph import Graph
    from graphrt.models.named import load
    from graphrt.ops.gradients import gradients
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
    "gradients",
    "load",
    "new_input",
    "new_tensor",
    "prepare",
    "register_backend",
]


_WHERE = {
    "DType": "dtypes",
    "Executable": "execute",
    "Graph": "graph",
    "GraphrtError": "errors",
    "Tensor": "tensor",
    "dtype": "dtypes",
    "get_backend": "backend",
    "gradients": "ops.gradients",
    "load": "models.named",
    "new_input": "tensor",
    "new_tensor": "tensor",
    "prepare": "execute",
    "register_backend": "backend",
}
_SUBPACKAGES = ("backends", "models", "ops", "testing", "tools")

library_settings.apply()  # before anything imports torch


def __getattr__(name: str) -> object:
    """Everything on first use: a bare `import graphrt` loads nothing, so that the command answers at once."""
    import importlib
    import importlib.util

    if name in _WHERE:
        value: object = getattr(importlib.import_module(f"graphrt.{_WHERE[name]}"), name)
        globals()[name] = value
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"graphrt.{name}") is not None:
        return importlib.import_module(f"graphrt.{name}")
    raise AttributeError(f"module 'graphrt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBPACKAGES, "errors"])
