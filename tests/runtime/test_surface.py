"""The public names, what an import costs, and that there is one import root."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import pytest
from support import ROOT

import graphrt
from graphrt import errors, ops

PUBLIC = {
    "DType", "Executable", "Graph", "GraphrtError", "Tensor", "__version__", "dtype", "get_backend", "gradients",
    "load", "new_input", "new_tensor", "prepare", "register_backend",
}  # fmt: skip
OPS = {
    "FlashAttnParams", "FlashAttnVarlenParams", "RopeParams", "RowSettings", "SampleParams", "add", "add_id",
    "all_gather", "all_reduce", "recv", "reduce_scatter", "send",
    "argmax", "argsort", "clamp", "concat", "cont", "cpy", "cross_entropy_loss", "cross_entropy_loss_back",
    "div", "dup", "fill", "flash_attn_back", "flash_attn_ext", "flash_attn_lse", "flash_attn_varlen",
    "flash_attn_varlen_back", "flash_attn_varlen_lse", "get_rows", "get_rows_back", "glu", "kq_mask", "l2_norm",
    "mul", "mul_mat", "mul_mat_id", "mul_mat_id_back", "norm", "opt_step_adamw", "opt_step_sgd", "out_prod",
    "out_prod_id", "penalize", "permute", "repeat", "repeat_back", "reshape", "rms_norm", "rms_norm_back", "rope",
    "rope_back", "sample", "sample_each", "scale", "set_rows", "set_rows_back", "silu_back", "soft_max",
    "soft_max_back", "sqr", "sqrt", "sub", "sum_rows", "top_k", "transpose", "unary", "unary_back", "view", "view_back",
}  # fmt: skip
ERRORS = {
    "GraphrtError": "Exception", "GraphError": "GraphrtError", "BackendError": "GraphrtError",
    "UnsupportedError": "BackendError", "MemoryPlanError": "GraphrtError", "ModelError": "GraphrtError",
    "GGUFError": "ModelError", "ArchError": "ModelError", "TokenizerError": "ModelError",
    "ChatTemplateError": "ModelError", "SessionError": "GraphrtError", "CacheFullError": "SessionError",
    "RankError": "GraphrtError", "HubError": "GraphrtError",
}  # fmt: skip


@pytest.mark.parametrize(("module", "names"), [(graphrt, PUBLIC), (ops, OPS)], ids=["graphrt", "graphrt.ops"])
def test_public_names(module: ModuleType, names: set[str]) -> None:
    assert set(module.__all__) == names, "a change of the public surface is made on purpose: change this list too"
    assert module.__all__ == sorted(module.__all__)
    for name in names:
        value = getattr(module, name)
        assert name == "__version__" or value.__doc__, f"{name} has no docstring"


def test_the_exception_tree() -> None:
    found = {n: c.__bases__[0].__name__ for n, c in vars(errors).items() if isinstance(c, type)}
    assert found == ERRORS
    tree = [line.split()[0] for line in (errors.__doc__ or "").splitlines() if "Error " in line]
    assert tree == list(ERRORS), "the module's docstring shows the tree"


def test_every_op_has_a_builder() -> None:
    other = {"FlashAttnParams", "FlashAttnVarlenParams", "RopeParams", "RowSettings", "SampleParams"}
    registered = {name.lower() for name in graphrt.op.registered_ops()}
    assert registered == OPS - other


def _python(code: str, *paths: str) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *paths]), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("what", "banned"),
    [
        ("graphrt", "torch triton gguf graphrt.backends"),
        ("graphrt.ops", "torch triton gguf graphrt.testing graphrt.ops.cases"),
        ("graphrt.tools.verbs.run, graphrt.models, graphrt.models.model", "graphrt.testing graphrt.ops.cases"),
    ],
)
def test_an_import_brings_in_no_more_than_it_needs(what: str, banned: str) -> None:
    code = f"import sys, {what}; print(*[m for m in {banned.split()!r} if m in sys.modules])"
    assert _python(code) == ""


def test_subpackages_come_on_first_use() -> None:
    code = "import sys, graphrt; print('graphrt.ops' in sys.modules, graphrt.ops.add.__name__)"
    assert _python(code) == "False add"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        graphrt.nothing  # noqa: B018


def test_ops_can_not_be_imported_twice() -> None:
    """`ops` as a top-level package is a second identity of the same files: the registry refuses it."""
    code = """
import graphrt.ops
from graphrt.errors import GraphError
try:
    import ops
except GraphError as error:
    print(error)
"""
    message = _python(code)
    if message == "":  # nothing of `ops` ran again: its modules import graphrt.ops by its full name
        message = _python(code.replace("    import ops", "    import ops.mul_mat"))
    assert "is registered once" in message and "graphrt.ops, never as `import ops`" in message


def test_an_op_is_registered_once() -> None:
    from graphrt.op import op_spec, register

    with pytest.raises(errors.GraphError, match="registered once, ADD is there already"):
        register(op_spec("ADD"))
    with pytest.raises(errors.GraphError, match="must be registered, got 'NOPE'"):
        op_spec("NOPE")
