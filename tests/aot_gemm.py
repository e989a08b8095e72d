"""What tests/aot.py compiles of the products of few tokens: every row of the table, with every kind of weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from graphrt.backends.triton.kernels.mul_mat import gemm, half_kernels
from graphrt.backends.triton.kernels.mul_mat.gemm_configs import MANY, Config, table_of
from graphrt.backends.triton.packing import PACKED_TYPES

ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")
_F32, _F16, _I32 = torch.zeros(64), torch.zeros(64, dtype=torch.float16), torch.zeros(64, dtype=torch.int32)
_PLAIN = {"f16": _F16, "bf16": torch.zeros(64, dtype=torch.bfloat16), "f32": _F32}
_TYPES = {"packed": PACKED_TYPES, "half": ("f16", "bf16"), "f32": ("f32",)}

#: name, kernel, arguments by name, options, architecture.
Case = tuple[str, Any, dict[str, Any], dict[str, Any], str]


def aot_cases(*archs: str) -> Iterator[Case]:
    """The kernels of some architectures, of all if none is named. f32's and rare forms are compiled in one shape."""
    for arch in archs or ARCHS:
        for i, row in enumerate(table_of(arch)):
            for kind in (t for name in row.kinds for t in _TYPES[name]):
                name = f"{arch} gemm row {i} {kind}"
                yield _case(name, arch, kind, row.config, row.n)
                if kind in ("q4_K", "f16"):
                    yield _case(f"{name} split", arch, kind, row.config, row.n, split=True)
                    yield _case(f"{name} odd k, residual", arch, kind, row.config, row.n, even=False, residual=True)
        yield from _others(arch)


def _case(
    name: str, arch: str, kind: str, config: Config, n: int, split: bool = False, even: bool = True,
    residual: bool = False,
) -> Case:  # fmt: skip
    tokens = config.tokens if n == MANY else min(n, config.tokens)
    k = 4096 if even else 4096 + 32 if kind in ("q4_0", "f16") else 4096 + 256 - (config.width > 256)
    args: dict[str, Any] = {
        "p_factors": _F32, "p_residual": _F32, "p_out": _F32, "m": 4096, "n": tokens, "n_batch": 1, "n_a2": 1,
        "ratio3": 1, "k": k, "k_steps": -(-k // config.width), "steps_a_split": 4, "n_splits": 2, "ROWS": config.rows,
        "TOKENS": tokens, "EVEN": even, "SPLIT": split, "HAS_FACTORS": not split, "HAS_RESIDUAL": residual,
    }  # fmt: skip
    if kind in _PLAIN:
        w = _PLAIN[kind]
        args |= {"p_w": w, "p_x": w, "row_stride": k, "stride2": 4096 * k, "stride3": 4096 * k, "WIDTH": config.width}
        args |= {"WIDEN": kind == "f32", "PRECISION": "ieee" if kind == "f32" else "tf32"}
    else:
        args |= {f"p_{plane}": _I32 for plane in ("quants", "high", "scales", "supers")} | {"p_x": _F16, "KIND": kind}
        args |= {"GROUPS": config.width // 32, "PTX": arch.startswith("sm_")}
    kernel = gemm.gemm_plain if kind in _PLAIN else gemm.gemm_packed
    return name, kernel, args, _options(arch, config.warps, config.stages), arch


def _options(arch: str, warps: int, stages: int | None = None) -> dict[str, Any]:
    return {"num_warps": warps} | ({"num_stages": stages} if stages else {})


def _others(arch: str) -> Iterator[Case]:
    rows: dict[str, Any] = {
        "p_x": _F32, "p_out": _F16, "p_factors": _F32, "stride_0": 1, "stride_1": 4096, "stride_2": 4096 * 512,
        "stride_3": 4096 * 512, "n_1": 512, "n_2": 1, "k": 4096, "BLOCK": 1024,
    }  # fmt: skip
    yield f"{arch} round_rows", half_kernels.round_rows, rows, _options(arch, 4), arch
    finish: dict[str, Any] = {
        "p_a": _F32, "p_a_factors": _F32, "p_b": _F32, "p_b_factors": _F32, "p_residual": _F32, "p_out": _F32,
        "part_stride": 1 << 20, "cols": 4096, "alpha": 1.5, "limit": 7.0, "A_PARTS": 8, "A_FACTORS": True,
        "B_PARTS": 8, "B_FACTORS": True, "GLU": "swiglu", "HAS_RESIDUAL": True, "ONLY_FACTORS": False, "BLOCK": 1024,
    }  # fmt: skip
    yield f"{arch} finish", half_kernels.finish, finish, _options(arch, 4), arch
