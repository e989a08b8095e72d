"""What `graphrt test --share` runs by default: cases in real shapes that reach each kernel of a GPU backend, and steps
of models. A case's `kernel` says which it is meant for; another backend runs it with whatever it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from graphrt import ops
from graphrt.ops.cases import flash_attn_back as back
from graphrt.ops.cases.flash_attn_axes import Axes as Attention
from graphrt.ops.cases.flash_attn_axes import as_case
from graphrt.ops.cases.mul_mat import Axes as Product
from graphrt.ops.cases.mul_mat import make as make_product
from graphrt.ops.cases.mul_mat_id import Axes as Experts
from graphrt.ops.cases.mul_mat_id import make as make_experts
from graphrt.ops.rope import RopeParams
from graphrt.tensor import Tensor
from graphrt.testing import Case, Inputs, Positions, Rows, Uniform

_PREFILL = Attention((128, 128), 75, 512, (4, 4), mask="random")
_DECODE = Attention((128, 128), 1, 2000, (8, 2))

ATTENTION: Mapping[str, Attention] = {
    "hopper, D 64": replace(_PREFILL, d=(64, 64)),
    "hopper, D 128": _PREFILL,
    "hopper, D 256": replace(_PREFILL, d=(256, 256)),
    "hopper, packed heads": replace(_PREFILL, heads=(8, 2), mask="causal", n_q=200),
    "hopper, softcap": replace(_PREFILL, softcap=30.0, mask="window"),
    "hopper, repaired": replace(_PREFILL, mask="blocks", spoil="nan", n_kv=700),
    "hopper_quant": replace(_PREFILL, types=("q8_0", "q8_0")),
    "hopper_quant, q4_0": replace(_PREFILL, types=("q4_0", "q4_0"), d=(64, 64)),
    "hopper_quant, f8": replace(_PREFILL, types=("f8_e4m3", "f8_e5m2")),
    "hopper_fp8": replace(_PREFILL, types=("f8_e4m3", "f8_e4m3"), prec=8),
    "hopper_mla": Attention((576, 512), 64, 300, (16, 1), layout="v_in_k"),
    "decode": _DECODE,
    "decode, q8_0": replace(_DECODE, types=("q8_0", "q8_0")),
    "portable": Attention((80, 80), 40, 300),
    "portable, few queries": replace(_DECODE, d=(96, 96)),
    "portable, quantized": Attention((64, 64), 3, 500, types=("q5_1", "iq4_nl")),
}

_LONG = back.Axes("q", n_q=300, n_kv=700, heads=(8, 2), n_seq=2, d=(128, 128), type="f16", mask="causal")
_ENDS = (0, 129, 130, 700)

BACKWARD: Mapping[str, back.Axes | back.Packed] = {
    **{f"back of {of}, D {d}": replace(_LONG, of=of, d=(d, d)) for d in (64, 128, 256) for of in "qkv"},
    **{f"back of {of}, dropout and bias": replace(_LONG, of=of, mask=None, dropout_p=0.1, bias=(1, 1), bias_type="f16")
       for of in ("q", "k", "v", "attn_bias")},
    "back of q, softcap": replace(_LONG, softcap=30.0, type="bf16"),
    "back of k, softcap": replace(_LONG, of="k", softcap=30.0, type="bf16"),
    "back of sinks": replace(_LONG, of="sinks", sinks=True),
    **{f"back of {of}, packed": back.Packed(of, _ENDS, _ENDS, (8, 2), (128, 128), "f16") for of in "qkv"},
    "back of k, f32": replace(_LONG, of="k", type="f32", d=(80, 80)),
}  # fmt: skip

PRODUCTS: Mapping[str, Product] = {
    "gemv, 8 bits": Product("q4_K", m=1024, n=1, k=4096),
    "gemv, two parts": Product("q4_K", m=1024, n=4, k=2048),
    "gemv, plain": Product("f16", m=1024, n=1, k=1024),
    "batch": Product("q4_K", m=1024, n=32, k=2048),
    "batch, q8_0": Product("q8_0", m=512, n=16, k=1024),
    "batch, codebook": Product("iq3_s", m=512, n=24, k=1024),
    "dense": Product("q6_K", m=512, n=200, k=1024),
    "dense, plain": Product("bf16", m=512, n=100, k=512),
    "a matrix a head": Product("f16", m=128, n=1, k=64, batch_a=(8, 1), batch_b=(8, 1)),
}

EXPERTS: Mapping[str, Experts] = {
    "experts, few pairs": Experts("mxfp4", m=256, k=512, n_expert=8, used=4, tokens=2),
    "experts, many pairs": Experts("mxfp4", m=256, k=512, n_expert=8, used=4, tokens=100),
    "experts, q4_K": Experts("q4_K", m=256, k=512, n_expert=8, used=2, tokens=70),
}


def _norm(inputs: Inputs) -> Tensor:
    return ops.rms_norm(inputs("a", "f32", (2048, 5)), 1e-5)


def _rotation(inputs: Inputs) -> Tensor:
    return ops.rope(inputs("a", "f32", (128, 8, 33)), inputs("pos", "i32", (33,), Positions(4000)), RopeParams(128))


def _cache_write(inputs: Inputs) -> Tensor:
    rows, ids = inputs("rows", "f32", (1024, 7)), inputs("ids", "i64", (7,), Rows(500, distinct=True))
    return ops.set_rows(rows, ids, inputs("target", "q8_0", (1024, 500)))


def _softmax(inputs: Inputs) -> Tensor:
    return ops.soft_max(inputs("a", "f32", (3000, 9)))


def _sampling(inputs: Inputs) -> Tensor:
    logits = inputs("logits", "f32", (128256, 2), Uniform(-9.0, 9.0))
    return ops.sample(logits, inputs("u", "f32", (2,), Uniform(0.0, 1.0)))


def _gated(inputs: Inputs) -> Tensor:
    return ops.glu(inputs("a", "f32", (4096, 6)), inputs("b", "f32", (4096, 6)), "swiglu")


OTHERS: Mapping[str, tuple[str, Callable[[Inputs], Tensor]]] = {
    "norm": ("RMS_NORM", _norm),
    "rotation": ("ROPE", _rotation),
    "cache write": ("SET_ROWS", _cache_write),
    "softmax": ("SOFT_MAX", _softmax),
    "sampling": ("SAMPLE", _sampling),
    "elementwise": ("GLU", _gated),
}


def _no_single_node(inputs: Inputs) -> Tensor:
    raise AssertionError("a model's step has no single node")


@dataclass(frozen=True)
class StepCase(Case):
    """Prefill and greedy decode of a synthetic model (models/synthetic.py), cut down to its first layers."""

    model: str = ""
    layers: int = 1


STEPS = (("smollm2-135m", 3), ("gpt-oss-20b", 1))


def share_cases() -> Iterator[Case]:
    """Every case of this module."""
    for kernel, attention in ATTENTION.items():
        yield replace(as_case("FLASH_ATTN_EXT", attention), axes={"kernel": kernel})
    for kernel, axes in BACKWARD.items():
        case = back.packed_case(axes) if isinstance(axes, back.Packed) else back.as_case(axes)
        yield replace(case, axes={"kernel": kernel})
    for kernel, product in PRODUCTS.items():
        yield Case("MUL_MAT", {"kernel": kernel}, partial(make_product, axes=product))
    for kernel, experts in EXPERTS.items():
        yield Case("MUL_MAT_ID", {"kernel": kernel}, partial(make_experts, axes=experts))
    for kernel, (op, make) in OTHERS.items():
        yield Case(op, {"kernel": kernel}, make)
    for model, layers in STEPS:
        yield StepCase("STEP", {"model": model, "layers": layers}, _no_single_node, model=model, layers=layers)
