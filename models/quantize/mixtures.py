"""Which type each tensor of a model gets: llama.cpp's rules for its file types, such as Q4_K_M.

A file type is a main type, and more bits where they help most: for values and the last product of attention, for the
feed-forward's last product in the first and last eighth of the layers and in every third between, and for the output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from graphrt.dtypes import TYPES, DType, dtype
from graphrt.errors import GGUFError
from graphrt.models.gguf import TensorInfo
from graphrt.models.quantize.types import WRITABLE


@dataclass(frozen=True)
class FileType:
    """What llama.cpp calls a file type: name, its number in `general.file_type`, and the type of most tensors."""

    name: str
    number: int
    main: DType


def _file_types(*rows: tuple[str, int, str]) -> dict[str, FileType]:
    return {name: FileType(name, number, TYPES[main]) for name, number, main in rows}


FILE_TYPES = _file_types(
    ("F32", 0, "f32"), ("F16", 1, "f16"), ("BF16", 32, "bf16"), ("Q8_0", 7, "q8_0"), ("Q6_K", 18, "q6_K"),
    ("Q5_K_M", 17, "q5_K"), ("Q5_K_S", 16, "q5_K"), ("Q5_1", 9, "q5_1"), ("Q5_0", 8, "q5_0"), ("Q4_K_M", 15, "q4_K"),
    ("Q4_K_S", 14, "q4_K"), ("IQ4_NL", 25, "iq4_nl"), ("IQ4_XS", 30, "iq4_xs"), ("Q4_1", 3, "q4_1"),
    ("Q4_0", 2, "q4_0"), ("MXFP4_MOE", 38, "mxfp4"), ("Q3_K_L", 13, "q3_K"), ("Q3_K_M", 12, "q3_K"),
    ("Q3_K_S", 11, "q3_K"), ("Q2_K", 10, "q2_K"), ("Q2_K_S", 21, "q2_K"), ("TQ2_0", 37, "tq2_0"),
    ("TQ1_0", 36, "tq1_0"),
)  # fmt: skip
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}

#: Tensors that stay as they are: small ones that say where the others' results go, and embeddings of positions.
_KEPT = re.compile(
    r"_norm\.weight|ffn_gate_inp\.weight|^position_embd\.weight$|^token_types\.weight$|ssm_conv1d|shortconv\.conv"
    r"|time_mix_|attn_rel_b\.weight|\.position_embd|\.patch_embd|altup|laurel|per_layer_model_proj"
)
#: Kinds of tensors that rules speak of, by what their names contain; the first that fits.
_KINDS = (
    ("attn_qkv.weight", "qkv"), ("attn_kv_b.weight", "kv_b"), ("attn_v.weight", "v"), ("attn_k.weight", "k"),
    ("attn_q.weight", "q"), ("attn_output.weight", "out"), ("ffn_up", "up"), ("ffn_gate", "gate"),
    ("ffn_down", "down"),
)  # fmt: skip
_VALUES = ("v", "qkv", "kv_b")
_LAYER = re.compile(r"blk\.([0-9]+)\.")
#: What takes a type's place where rows are no multiple of its blocks.
_SMALLER = {
    "iq4_xs": "iq4_nl", "q2_K": "q4_0", "q3_K": "q4_0", "tq1_0": "q4_0", "tq2_0": "q4_0", "q4_K": "q5_0",
    "q5_K": "q5_1", "q6_K": "q8_0",
}  # fmt: skip
#: Of a model with eight experts a layer, attention is a small part: its last product has more bits in these.
_MORE_OUT = ("Q2_K", "Q3_K_S", "Q3_K_M", "IQ4_NL", "IQ4_XS", "Q4_K_S", "Q4_K_M")


def file_type(name: str) -> FileType:
    """The file type of that name, in any case, or of a plain type's. Raises GGUFError for an unknown one."""
    upper = name.upper()
    found = FILE_TYPES.get(ALIASES.get(upper, upper))
    if found is None:
        known = ", ".join([*FILE_TYPES, *ALIASES])
        raise GGUFError(f"the type to quantize to must be one of {known}, got {name[:40]!r}. Choose one of these.")
    return found


def writable(name: str) -> DType:
    """The type of tensors of that name. Raises GGUFError for one that can't be written."""
    found = next((TYPES[t] for t in WRITABLE if t.lower() == name.lower()), None)
    if found is None:
        raise GGUFError(
            f"a tensor's type must be one of {', '.join(WRITABLE)}, got {name[:40]!r}. Choose one of these."
        )
    return found


@dataclass(frozen=True)
class Traits:
    """What rules ask of a model. n_gqa: heads of queries for one of values; is_70b: llama with 80 layers and n_gqa over
    1, whose values are few."""

    arch: str
    n_layer: int
    n_gqa: int = 1
    n_expert: int = 0
    is_70b: bool = False


@dataclass(frozen=True)
class Request:
    """What is asked for. output, token_embd: types of these tensors, None for the rules'; pure: the main type for all
    that is quantized; has_importance: errors are weighed."""

    file_type: FileType
    output: DType | None = None
    token_embd: DType | None = None
    pure: bool = False
    has_importance: bool = False


def is_kept(info: TensorInfo) -> bool:
    """Whether a tensor stays as it is, whatever is asked for."""
    flat = all(n == 1 for n in info.ne[1:]) or 0 in info.ne
    return flat or not info.name.endswith("weight") or _KEPT.search(info.name) is not None


@dataclass
class _Rules:
    """Goes through tensors in their order: some rules count those of a kind."""

    request: Request
    traits: Traits
    n_values: int
    tied: bool
    seen: dict[str, int] = field(default_factory=dict)

    def choose(self, info: TensorInfo) -> DType:
        name, r = info.name, self.request
        if is_kept(info):
            return info.dtype
        if name == "token_embd.weight" and r.token_embd is not None:
            return r.token_embd
        if name == "output.weight" and r.output is not None:
            return r.output
        if not r.file_type.main.is_quantized:
            return r.file_type.main
        main = r.file_type.main.name
        return _fitting(dtype(main if r.pure else self._by_rule(info, main)), info)

    def _by_rule(self, info: TensorInfo, main: str) -> str:
        name, ftype = info.name, self.request.file_type.name
        if name == "output.weight" or (self.tied and name == "token_embd.weight"):
            return self._of_output(info, main)
        if ftype == "MXFP4_MOE":
            return "mxfp4" if len(info.ne) > 2 and info.ne[2] > 1 else "q8_0"
        if name == "token_embd.weight":
            return "q4_K" if ftype in ("TQ1_0", "TQ2_0") else main
        kind = next((kind for part, kind in _KINDS if part in name), "")
        if kind in _VALUES:
            return self._of_values(self._count("values"), main)
        if kind == "k":
            return "q8_0" if self.traits.n_expert == 8 else main
        if kind == "down":
            return self._of_down(name, main)
        return self._of_attention_output(main) if kind == "out" else main

    def _of_output(self, info: TensorInfo, main: str) -> str:
        if self.request.output is not None:
            return self.request.output.name
        whole_blocks = info.ne[0] % TYPES[main].block_size == 0
        if self.request.file_type.name == "MXFP4_MOE" or self.traits.arch == "falcon" or not whole_blocks:
            return "q8_0"
        return main if main == "q8_0" else "q6_K"

    def _of_values(self, i: int, main: str) -> str:
        ftype, grouped = self.request.file_type.name, self.traits.n_gqa >= 4
        chosen = main
        if ftype == "Q2_K":
            chosen = "q4_K" if grouped else "q3_K"
        elif ftype == "Q2_K_S" and grouped:
            chosen = "q4_K"
        elif ftype == "Q3_K_M":
            chosen = "q5_K" if i < 2 else "q4_K"
        elif ftype == "Q3_K_L" or (ftype in ("IQ4_NL", "IQ4_XS") and grouped):
            chosen = "q5_K"
        elif ftype in ("Q4_K_M", "Q5_K_M") and _more_bits(i, self.n_values):
            chosen = "q6_K"
        elif ftype == "Q4_K_S" and i < 4:
            chosen = "q5_K"
        if self.traits.is_70b and chosen in ("q3_K", "q4_K"):
            chosen = "q5_K"
        return "q8_0" if self.traits.n_expert == 8 else chosen

    def _of_down(self, name: str, main: str) -> str:
        ftype, n, falcon = self.request.file_type.name, self.traits.n_layer, self.traits.arch == "falcon"
        i = self._count("down")
        if self.traits.n_expert > 1:
            i = _layer_of(name, n)
        more, first = _more_bits(i, n), i < n // 8
        if ftype == "Q2_K":
            return "q3_K"
        if ftype == "Q2_K_S":
            return "q4_K" if first else main
        if ftype == "Q3_K_M":
            return "q5_K" if i < n // 16 else "q4_K" if more or not falcon else main
        if ftype == "Q3_K_L":
            return "q4_K" if falcon else "q5_K"
        if ftype == "Q4_K_M" and falcon:
            return "q6_K" if i < n // 16 else "q5_K" if more else main
        if ftype in ("Q4_K_M", "Q5_K_M"):
            return "q6_K" if more else main
        if ftype == "Q4_K_S":
            return "q5_K" if first and not falcon else main
        if ftype in ("IQ4_NL", "IQ4_XS"):
            return "q5_K" if first and not self.request.has_importance else main
        if ftype in ("Q4_0", "Q5_0") and self.request.has_importance and first:
            return "q4_1" if ftype == "Q4_0" else "q5_1"
        return main

    def _of_attention_output(self, main: str) -> str:
        ftype = self.request.file_type.name
        if self.traits.arch == "falcon":
            return "q4_K" if ftype == "Q3_K_L" else main
        if self.traits.n_expert == 8:
            return "q5_K" if ftype in _MORE_OUT else main
        return {"Q2_K": "q3_K", "Q3_K_M": "q4_K", "Q3_K_L": "q5_K"}.get(ftype, main)

    def _count(self, kind: str) -> int:
        self.seen[kind] = self.seen.get(kind, -1) + 1
        return self.seen[kind]


def choose(tensors: Sequence[TensorInfo], request: Request, traits: Traits) -> list[DType]:
    """The type of each tensor. Raises GGUFError for one whose name must tell its layer and does not."""
    # llama.cpp goes through them by layer, and then by name.
    order = sorted(range(len(tensors)), key=lambda i: (_layer_or(tensors[i].name, -1), tensors[i].name))
    n_values = sum(any(part in t.name and kind in _VALUES for part, kind in _KINDS) for t in tensors)
    tied = all(t.name != "output.weight" for t in tensors)
    rules = _Rules(request, traits, n_values, tied)
    chosen = {i: rules.choose(tensors[i]) for i in order}
    return [chosen[i] for i in range(len(tensors))]


def traits_of(metadata: Mapping[str, object], tensors: Mapping[str, TensorInfo]) -> Traits:
    """What the rules ask, by a file's keys; what a file does not say counts as 1, or as none."""
    arch = str(metadata.get("general.architecture", ""))

    def number(key: str, default: int) -> int:
        value = metadata.get(f"{arch}.{key}", default)
        if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu":
            value = int(value[0])  # one a layer: that of the first
        return value if type(value) is int else default

    layers = [_layer_or(name, -1) for name in tensors]
    n_layer = number("block_count", max(layers, default=-1) + 1)
    heads = number("attention.head_count", 1)
    kv = number("attention.head_count_kv", heads)
    gqa = heads // kv if kv > 0 else 0
    is_70b = arch == "llama" and n_layer == 80 and heads != kv
    return Traits(arch, n_layer, gqa, number("expert_count", 0), is_70b)


def _more_bits(i: int, n: int) -> bool:
    """Whether the i-th of n layers is of the first or last eighth, or of every third between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _layer_or(name: str, default: int) -> int:
    found = _LAYER.match(name)
    return int(found[1]) if found else default


def _layer_of(name: str, n: int) -> int:
    i = _layer_or(name, -1)
    if not 0 <= i < n:
        raise GGUFError(f"a tensor with experts must be named blk.N... with N from 0 to {n - 1}, got {name!r}.")
    return i


def _fitting(wanted: DType, info: TensorInfo) -> DType:
    """The type, or one of smaller blocks where rows are no multiple of its own, at last f16."""
    if info.ne[0] % wanted.block_size == 0:
        return wanted
    smaller = TYPES[_SMALLER.get(wanted.name, "f16")]
    return smaller if info.ne[0] % smaller.block_size == 0 else TYPES["f16"]
