"""Models made up in memory: a known model's shapes and types, and random weights. What `graphrt bench` measures with.

    file = synthetic("llama-8b:q4_k_m")      # no data yet
    Model(file, [backend])                   # each tensor is made when it is asked for, and then let go

The architecture itself says what tensors it needs; a recipe has its keys, and a mix the types. There is no vocabulary.
"""

from __future__ import annotations

import difflib
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphrt.dtypes import DType, dtype
from graphrt.errors import SessionError
from graphrt.models.arch import architecture
from graphrt.models.gguf import GGUFFile, Metadata, TensorInfo
from graphrt.models.hparams import Keys
from graphrt.models.synthetic_blocks import TYPES, Bytes, cut, drawn, places, pool
from graphrt.models.synthetic_recipes import RECIPES, Recipe
from graphrt.models.weights import Weights
from graphrt.tensor import Tensor, new_tensor


@dataclass(frozen=True)
class Mix:
    """The types of a quantization. base: of matrices; output: of the output, and of an embedding tied to it; better:
    of the tensors named `where`, in the layers that `more_bits` picks; experts: of experts' matrices, "" for base;
    v_of_70b: of attn_v in Llama's 70B, where it has few heads and base would be q4_K."""

    base: str
    output: str
    better: str = ""
    where: tuple[str, ...] = ()
    experts: str = ""
    v_of_70b: str = "q5_K"

    def type_of(self, name: str, k: int, layers: int, tied: bool, is_70b: bool = False) -> DType:
        """The type of the matrix `name` with rows of k elements."""
        block, _, rest = name.removeprefix("blk.").partition(".")
        if name == "output.weight" or (tied and name == "token_embd.weight"):
            kind = self.output
        elif rest.removesuffix(".weight") in self.where and more_bits(int(block), layers):
            kind = self.better
        elif self.experts and "_exps." in rest:
            kind = self.experts
        else:
            kind = self.v_of_70b if is_70b and self.base == "q4_K" and rest == "attn_v.weight" else self.base
        return _fitting(dtype(kind), k)


def more_bits(layer: int, layers: int) -> bool:
    """The first eighth of the layers, the last eighth, and every third between (llama.cpp, src/llama-quant.cpp)."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


#: llama.cpp's mixes (the same file), without an importance matrix; then all matrices in one type, to compare types.
MIXES = {
    "q4_k_m": Mix("q4_K", "q6_K", "q6_K", ("attn_v", "ffn_down", "ffn_down_exps", "ffn_down_shexp")),
    "q4_0": Mix("q4_0", "q6_K"),
    "q4_1": Mix("q4_1", "q6_K"),
    "mxfp4": Mix("q8_0", "q8_0", experts="mxfp4"),
    **{name.lower(): Mix(name, name) for name in TYPES if name not in ("q4_0", "q4_1", "mxfp4")},
}
_ROUTER = "ffn_gate_inp.weight"  # never quantized
#: Behind a model's name: its weights make a chain.
CHAIN = "+chain"
#: The last parts of the names of what layers add to their input by, which are zeros in a chain.
_ADDED = ("attn_output", "ffn_down", "ffn_down_exps", "ffn_down_shexp")
#: What takes a type's place where a row is no whole number of its blocks (the same file); f16 where that fails too.
FALLBACKS = {"q4_K": "q5_0", "q6_K": "q8_0"}


def _fitting(kind: DType, k: int) -> DType:
    if k % kind.block_size:
        kind = dtype(FALLBACKS.get(kind.name, "f16"))
    return dtype("f16") if k % kind.block_size else kind


def synthetic(name: str, layers: int | None = None, *, vocabulary: bool = False) -> SyntheticFile:
    """The model "RECIPE:MIX", or "RECIPE" in its usual mix. layers: cut down to the first so many; vocabulary: it has
    one, of made-up words, and a chat template. With "+chain" behind the name each token has one that follows it: see
    SyntheticFile.

    Raises SessionError for a name that isn't known.
    """
    plain = name.lower().removesuffix(CHAIN)
    shape, _, mix = plain.partition(":")
    recipe = _known("a synthetic model", RECIPES, shape)
    chain = plain != name.lower()
    if chain and recipe.tied:
        raise SessionError(
            f"a chain needs an output matrix that isn't the embedding, got {name[:40]!r}; leave +chain out"
        )
    return SyntheticFile(shape, recipe, mix or recipe.mix, layers, vocabulary=vocabulary, chain=chain)


def _known(what: str, table: Mapping[str, Any], name: str) -> Any:
    if name not in table:
        close = difflib.get_close_matches(name, table, 1, 0.4)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise SessionError(f"{what} must be one of {', '.join(table)}, got {name[:40]!r}{hint}")
    return table[name]


class SyntheticFile(GGUFFile):
    """What a Model needs of a file. The same name gives the same bytes, on every machine.

    nbytes: of all tensors. chain: layers add zeros to their input, and a token's embedding is the output's row of the
    next one, so that the likeliest token after each one follows from that alone, whatever was before. No two rows of
    the output are alike, so that rounding doesn't change it. A step takes as long as with other weights. So what will
    be said is known, and a prompt can hold parts of it.
    """

    def __init__(
        self, shape: str, recipe: Recipe, mix: str, layers: int | None, *, vocabulary: bool = False, chain: bool = False
    ) -> None:
        types: Mix = _known(f"a quantization of {shape}", MIXES, mix)
        self.name, self.chain = f"{shape}:{mix}{CHAIN if chain else ''}", chain
        self.recipe = recipe
        self.version, self.byte_order, self.alignment, self.paths = 3, "little", 32, []
        self._buffers, self._swap = [], False
        self._pools: dict[tuple[str, int], Bytes] = {}
        self._places: dict[str, list[int]] = {}
        keys = recipe.keys if layers is None else {**recipe.keys, "block_count": layers}
        values: dict[str, Any] = {"general.architecture": recipe.arch, "tokenizer.ggml.model": "no_vocab"}
        for key, value in keys.items():
            values[key if key.startswith("tokenizer.") else f"{recipe.arch}.{key}"] = value
        values |= _words(int(recipe.keys["vocab_size"])) if vocabulary else {}
        self.metadata = Metadata(values, bytearray(), "<")
        self.tensors = {}
        offset, n_layers = 0, int(keys["block_count"])
        for tensor, ne in self._shapes().items():
            plain = len(ne) == 1 or tensor == "position_embd.weight" or tensor.endswith((".bias", _ROUTER))
            like = "output.weight" if chain and tensor == "token_embd.weight" else tensor
            kind = dtype("f32") if plain else types.type_of(like, ne[0], n_layers, recipe.tied, recipe.is_70b)
            nbytes = kind.row_size(math.prod(ne))
            self.tensors[tensor] = TensorInfo(tensor, kind, ne, offset, nbytes)
            offset += nbytes
        self.nbytes = offset

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        recipe = self.recipe
        present = (*recipe.optional, *([] if recipe.tied else ["output.weight"]))
        present += ("rope_freqs.weight",) if recipe.rope_factor else ()
        cls, asked = architecture(recipe.arch), _Asked(present)
        cls(cls.read(Keys(self)), asked)
        return asked.shapes

    def data(self, name: str) -> Bytes:
        """The tensor's bytes, 1-D, made anew at each call. Raises GGUFError for an unknown name."""
        return self.span(name, 0, self._info(name).nbytes)

    def span(self, name: str, start: int, stop: int) -> Bytes:
        """As GGUFFile has it; of a matrix no more than that is made."""
        info = self._info(name)
        if self.chain and name.split(".")[-2] in _ADDED:
            return np.zeros(stop - start, np.uint8)
        if self.chain and name == "token_embd.weight":
            row = info.dtype.row_size(info.ne[0])
            behind = self.span("output.weight", min(start + row, info.nbytes), min(stop + row, info.nbytes))
            return np.concatenate(
                [behind, self.span("output.weight", *(max(0, at + row - info.nbytes) for at in (start, stop)))]
            )
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        if name == "rope_freqs.weight":
            return self._rope_factors().astype(np.float32).view(np.uint8)[start:stop]
        if name.endswith((".bias", _ROUTER)) or name == "position_embd.weight":
            std = info.ne[0] ** -0.5 if name.endswith(_ROUTER) else 0.02
            return (std * rng.standard_normal(math.prod(info.ne))).astype(np.float32).view(np.uint8)[start:stop]
        if len(info.ne) == 1:
            return rng.uniform(0.8, 1.2, info.ne).astype(np.float32).view(np.uint8)[start:stop]
        if self.chain and name == "output.weight":  # two rows alike would be two next tokens, of which rounding chooses
            return drawn(info.dtype, info.ne[0] ** -0.5, zlib.crc32(name.encode()), start, stop)
        key = info.dtype.name, info.ne[0]
        if key not in self._pools:
            self._pools[key] = pool(info.dtype, info.ne[0] ** -0.5, np.random.default_rng(info.ne[0]))
        if name not in self._places:
            self._places[name] = places(self._pools[key], info.nbytes, rng)
        return cut(self._pools[key], start, stop, self._places[name])

    def _rope_factors(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Llama 3.1's: wavelengths over the trained context of 8192 are stretched by the factor, those under a quarter
        of it stay, and between the two it goes over smoothly."""
        keys = Keys(self)
        n_dims, base = keys.get("rope.dimension_count", int), keys.get("rope.freq_base", float)
        turns = 8192 / (2 * np.pi * base ** (np.arange(0, n_dims, 2) / n_dims))
        kept = np.clip((turns - 1) / 3, 0, 1)
        factors: np.ndarray[Any, np.dtype[np.float64]] = 1 / (kept + (1 - kept) / self.recipe.rope_factor)
        return factors

    @property
    def _label(self) -> str:
        return f"synthetic {self.name}"


def _words(n: int) -> dict[str, Any]:
    """The keys of a vocabulary of n tokens: what every one has, all bytes, and words that are numbers."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = [*tokens, *(f"\u2581w{i}" for i in range(len(tokens), n))][:n]
    found = {
        "tokens": tokens, "scores": -np.arange(n, dtype=np.float32),
        "token_type": np.array([2, 3, 3, *[6] * 256, *[1] * n][:n], np.int32), "model": "llama",
        "bos_token_id": 1, "eos_token_id": 2,
        "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:",
    }  # fmt: skip
    return {f"tokenizer.{'' if key == 'chat_template' else 'ggml.'}{key}": value for key, value in found.items()}


class _Asked(Weights):
    """Notes what an architecture asks for, and gives it leafs without memory. present: ends of the names of those
    optional ones that there are."""

    def __init__(self, present: tuple[str, ...]) -> None:
        self.present = present
        self.shapes: dict[str, tuple[int, ...]] = {}

    def __call__(self, name: str, *ne: int, optional: bool = False) -> Any:
        if optional and not name.endswith(self.present):
            return None
        self.shapes[name] = ne
        leaf: Tensor = new_tensor("f32", *ne, name=name)
        return leaf

    def leave(self, name: str) -> None:
        """No file here has what nothing reads."""
