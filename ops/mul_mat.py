"""MUL_MAT: weights of any type times f32 activations."""

from __future__ import annotations

from collections.abc import Iterator

from graphrt.dtypes import F32
from graphrt.op import OpSpec, Result, Sources, Work, build, moved_bytes, register, require
from graphrt.ops.view import permute
from graphrt.tensor import Tensor
from graphrt.testing import Case, Inputs


def _infer(src: Sources, params: None) -> Result:
    a, b = src
    assert a is not None and b is not None
    require(a.dtype.kind != "int", "MUL_MAT", "weights must be a float or quantized type", a)
    require(b.dtype.name in ("f32", "f16"), "MUL_MAT", "activations must be f32 or f16", b)
    require(a.ne[0] == b.ne[0], "MUL_MAT", "both must have equal ne[0]", a, b)
    fits = b.ne[2] % a.ne[2] == 0 and b.ne[3] % a.ne[3] == 0
    require(fits, "MUL_MAT", "dimensions 2 and 3 of the weights must divide those of the activations", a, b)
    return Result(F32, (a.ne[1], *b.ne[1:]))


def _work(node: Tensor) -> Work:
    a = node.src[0]
    assert a is not None
    return Work(2 * a.ne[0] * node.n_elements, moved_bytes(node))


def _cases() -> Iterator[Case]:
    plain = ("f32", "f16", "bf16")
    quantized = (
        "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs", "mxfp4",
        "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m", "tq1_0", "tq2_0", "nvfp4",
    )  # fmt: skip
    for dt in (*plain, *quantized):
        for n in (1, 2, 9):

            def make(inputs: Inputs, dt: str = dt, n: int = n) -> Tensor:
                return mul_mat(inputs("a", dt, (256, 16)), inputs("b", "f32", (256, n)))

            yield Case("MUL_MAT", {"type": dt, "m": 16, "n": n, "k": 256}, make)
    for dt, batch_a, batch_b in [("f32", (1, 1), (3, 2)), ("f16", (2, 1), (4, 3)), ("q8_0", (2, 2), (2, 4))]:

        def make_batch(
            inputs: Inputs, dt: str = dt, ba: tuple[int, int] = batch_a, bb: tuple[int, int] = batch_b
        ) -> Tensor:
            return mul_mat(inputs("a", dt, (64, 5, *ba)), inputs("b", "f32", (64, 3, *bb)))

        yield Case("MUL_MAT", {"type": dt, "batch_a": batch_a, "batch_b": batch_b}, make_batch)

    def make_permuted(inputs: Inputs) -> Tensor:
        a = permute(inputs("a", "f16", (32, 3, 7)), 0, 2, 1, 3)
        return mul_mat(a, permute(inputs("b", "f32", (32, 6, 5)), 0, 2, 1, 3))

    yield Case("MUL_MAT", {"type": "f16", "permuted": True}, make_permuted)


MUL_MAT = register(OpSpec("MUL_MAT", _infer, _cases, _work, n_src=(2, 2)))


def mul_mat(a: Tensor, b: Tensor, name: str = "") -> Tensor:
    """a (not transposed) times b. a: [k, m, a2, a3] any float or quantized type; b: [k, n, b2, b3] f32 or f16.

    The result is f32 [m, n, b2, b3]; result[i, j] = sum_k a[k, i] b[k, j]. a2 divides b2 and a3 divides b3:
    consecutive matrices of b share one of a.
    """
    return build(MUL_MAT, a, b, name=name)
