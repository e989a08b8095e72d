"""What support/aot.py compiles of the products of few tokens: every row of the table, with every kind of weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from graphrt.backends.triton.kernels.products import half, half_kernels
from graphrt.backends.triton.kernels.products.gemm_small import mma_launch, portable, wgmma_launch
from graphrt.backends.triton.kernels.products.gemm_small.arguments import Split
from graphrt.backends.triton.kernels.products.gemm_small.configs import MANY, Config, table_of
from graphrt.backends.triton.kernels.products.gemm_small.wgmma_launch import HopperConfig
from graphrt.backends.triton.kernels.products.half import Activations, Gate
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.packing import PACKED_TYPES, Packed
from support.aot_arch import target_of

_F32, _F16, _I32 = torch.zeros(64), torch.zeros(64, dtype=torch.float16), torch.zeros(64, dtype=torch.int32)
_PLAIN = {"f16": _F16, "bf16": torch.zeros(64, dtype=torch.bfloat16), "f32": _F32}
_TYPES = {"packed": PACKED_TYPES, "half": ("f16", "bf16"), "f32": ("f32",)}

#: name, kernel, arguments by name, options.
Case = tuple[str, Any, dict[str, Any], dict[str, Any]]


def aot_cases(arch: str) -> Iterator[Case]:
    """The kernels of an architecture. f32's and rare forms are compiled in one shape."""
    for i, row in enumerate(table_of(arch)):
        for kind in (t for name in row.kinds for t in _TYPES[name]):
            name = f"{arch} gemm row {i} {kind}"
            yield _case(name, arch, kind, row.config, row.n)
            if kind in ("q4_K", "f16"):
                yield _case(f"{name} split", arch, kind, row.config, row.n, split=True)
                yield _case(f"{name} odd k, residual", arch, kind, row.config, row.n, even=False, residual=True)
    yield from _others(arch)
    if arch.startswith("sm_"):
        yield from _batch_cases(arch)
    if arch == "sm_90":
        yield from _hopper_cases()


def _batch_cases(arch: str) -> Iterator[Case]:
    """gemm_small/mma.py: every type for 16 tokens, two of them for all, and all forms of one."""
    target = target_of(arch)
    few, many = torch.zeros(4096, dtype=torch.int32), torch.zeros(1 << 20)

    def case(kind: str, n: int, count: int = 1, gate: str = "", added: bool = False, whole: bool = False) -> Case:
        weights = [Packed.empty(kind, 64, 1024, "cpu")] * count
        config = mma_launch.config_for(target, kind, n)
        assert config is not None
        split = None if whole else Split(2, 2, many, few)
        x = Activations(torch.zeros(n, 1024, dtype=torch.float16), None if count == 1 else _F32)
        outs = [torch.zeros(n, 64)] * (1 if gate else count)
        biases = [_F32] * count if added or (count > 1 and not gate) else []
        made = mma_launch.launch(
            target, weights, x, outs, config, biases, outs[0] if added else None, Gate(gate) if gate else None, split
        )
        return f"{arch} batch {kind} {n} {count} {gate} {whole}", made.kernel, made.args, made.options

    # On Hopper it serves only activations that are f16 as they come.
    for kind in mma_launch.KINDS if arch != "sm_90" else ():
        yield case(kind, 16, whole=True)
    for kind in ("q4_K", "q6_K") if arch != "sm_90" else ("q4_K",):
        for n in (16, 32, 64):
            yield case(kind, n, added=True)
        yield case(kind, 64, whole=True)
        yield case(kind, 16, 3, whole=True)
        yield case(kind, 64, 2, "swiglu")
        yield case(kind, 16, 2, "reglu", whole=True)


#: Two or four warpgroups, and two programs at a time.
_HOPPER = (HopperConfig(2, 4, 4, 6), HopperConfig(4, 4, 2, 4), HopperConfig(2, 4, 2, 4, per_sm=2))


def _hopper_cases() -> Iterator[Case]:
    """gemm_small/wgmma.py: every type, and what fits into registers of other configs and forms.

    Two programs at a time leave 80 registers a thread: too few for 64 tokens, and for q6_K from 32 on."""
    target = target_of("sm_90")
    split = Split(2, 2, torch.zeros(1 << 20), torch.zeros(4096, dtype=torch.int32))

    def case(kind: str, tokens: int, config: HopperConfig, count: int = 1, gate: str = "", split: Any = None) -> Case:
        weights = [Packed.empty(kind, 64, 1024, "cpu")] * count
        outs = [torch.zeros(tokens, 64)] * (1 if gate else count)
        x = Activations(torch.zeros(tokens, 1024, dtype=torch.float16), None if count == 1 else _F32)
        fitted = wgmma_launch.fitted(config, kind, tokens, target.shared_memory)
        assert fitted is not None
        added = outs[0] if split else None
        biases = [_F32] * count if split or (count > 1 and not gate) else []
        gated = Gate(gate) if gate else None
        made = wgmma_launch.launch(target, weights, x, outs, fitted, tokens, biases, added, gated, split)
        form = f"{config.warpgroups}x{config.per_sm} {count} {gate}{f'split in {split.ranges}' if split else ''}"
        return f"sm_90 wgmma {kind} {tokens} {form}", made.kernel, made.args, made.options

    two, four, at_once = _HOPPER
    for kind in mma_launch.KINDS:
        yield case(kind, 64, two)
    for kind, tokens, count, gate in (("q4_K", 128, 1, ""), ("q6_K", 256, 1, ""), ("q4_K", 256, 2, "swiglu")):
        many = wgmma_launch.config_for(target, kind, tokens, 4096, 1024)
        assert many is not None
        yield case(kind, tokens, many, count, gate, None if gate else split)
    for tokens in (16, 32):
        yield case("q4_K", tokens, two)
        yield case("q4_K", tokens, at_once)
    one = wgmma_launch.config_for(target, "q4_K", 64, 4096, 4096)
    assert one is not None and one.warpgroups == 1
    yield case("q4_K", 64, one, split=split)
    for tokens in (16, 64):  # q6_K's high bits take registers that four warpgroups don't have
        yield case("q4_K", tokens, four)
    yield case("q6_K", 32, two)
    yield case("q6_K", 16, at_once)
    yield case("q4_K", 64, four, 2, "swiglu")
    yield case("q4_K", 64, two, 3)
    yield case("q6_K", 64, two, 2, "reglu")
    yield case("q6_K", 64, two, 1, "", split)
    shares = Split(4, 2, torch.zeros(1 << 20), torch.zeros(4096, dtype=torch.int32))  # added up by all programs
    for kind in ("q4_K", "q6_K"):
        yield case(kind, 64, two, 1, "", shares)
    yield case("q4_K", 64, two, 2, "swiglu", shares)


def _case(
    name: str, arch: str, kind: str, config: Config, n: int, split: bool = False, even: bool = True,
    residual: bool = False,
) -> Case:  # fmt: skip
    tokens = config.tokens if n == MANY else min(n, config.tokens)
    k = 4096 if even else 4096 + 32 if kind in ("q4_0", "f16") else 4096 + 256 - (config.width > 256)
    args: dict[str, Any] = {
        "p_factors": _F32, "p_bias": _F32, "p_residual": _F32, "p_out": _F32, "m": 4096, "n": tokens,
        "n_batch": 1, "n_a2": 1, "ratio3": 1, "k": k, "k_steps": -(-k // config.width), "steps_a_split": 4,
        "n_splits": 2, "ROWS": config.rows, "TOKENS": tokens, "EVEN": even, "SPLIT": split, "HAS_FACTORS": not split,
        "HAS_BIAS": residual, "HAS_RESIDUAL": residual,
    }  # fmt: skip
    if kind in _PLAIN:
        w = _PLAIN[kind]
        args |= {"p_w": w, "p_x": w, "row_stride": k, "stride2": 4096 * k, "stride3": 4096 * k, "WIDTH": config.width}
        args |= {"WIDEN": kind == "f32", "PRECISION": "ieee" if kind == "f32" else "tf32"}
    else:
        args |= {"packed": Packed.empty(kind, 16, 1024, "cpu").word_planes(), "p_x": _F16, "KIND": kind}
        args |= {"GROUPS": config.width // 32, "PTX": arch.startswith("sm_")}
    kernel = portable.gemm_plain if kind in _PLAIN else portable.gemm_packed
    return name, kernel, args, _options(config.warps, config.stages)


def _options(warps: int, stages: int | None = None) -> dict[str, Any]:
    return {"num_warps": warps} | ({"num_stages": stages} if stages else {})


def _others(arch: str) -> Iterator[Case]:
    rows: dict[str, Any] = {
        "p_x": _F32, "p_out": _F16, "p_factors": _F32, "stride_0": 1, "stride_1": 4096, "stride_2": 4096 * 512,
        "stride_3": 4096 * 512, "n_1": 512, "n_2": 1, "k": 14336,
        "PDL": arch in ("sm_90", "sm_100"),
    }  # fmt: skip
    for whole, block, warps in ((False, 1024, 4), (True, 16384, 16)):
        for ordered in (False, True) if arch == "sm_90" else (False,):
            args = rows | {"WHOLE": whole, "ORDERED": ordered, "BLOCK": block}
            yield f"{arch} round_rows {block} {ordered}", half_kernels.round_rows, args, _options(warps)
    rounded: dict[str, Any] = {
        "p_a": _F32, "p_a_factors": _F32, "p_b": _F32, "p_b_factors": _F32, "p_out": _F16, "p_factors": _F32,
        "part_stride": 1 << 20, "cols": 14336, "alpha": 1.5, "limit": 7.0, "A_PARTS": 1, "A_FACTORS": True,
        "B_PARTS": 1, "B_FACTORS": True, "GLU": "swiglu_oai", "BLOCK": 16384,
    }  # fmt: skip
    yield f"{arch} finish_rounded", half_kernels.finish_rounded, rounded, _options(16)
    finish: dict[str, Any] = {
        "p_a": _F32, "p_a_factors": _F32, "p_b": _F32, "p_b_factors": _F32, "p_bias": _F32, "p_residual": _F32,
        "p_out": _F32, "part_stride": 1 << 20, "cols": 4096, "alpha": 1.5, "limit": 7.0, "A_PARTS": 8,
        "A_FACTORS": True, "B_PARTS": 8, "B_FACTORS": True, "GLU": "reglu", "HAS_BIAS": True, "HAS_RESIDUAL": True,
        "ONLY_FACTORS": False, "BLOCK": 1024,
    }  # fmt: skip
    yield f"{arch} finish", half_kernels.finish, finish, _options(4)
    for step in half.rescaling(torch.zeros(64, 8, 128).transpose(0, 1), torch.zeros(512)):
        assert isinstance(step, Launch)
        yield f"{arch} rescale_rows", step.kernel, step.args, step.options
