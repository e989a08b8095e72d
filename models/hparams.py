"""Hyperparameters: the keys of a GGUF file as one typed record, with what can't be honoured refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from graphrt.errors import ArchError
from graphrt.models.gguf import GGUFFile
from graphrt.models.hparam_keys import OF_EXPERTS, changes_the_result
from graphrt.models.hparam_limits import MAX_LAYERS
from graphrt.models.key_reader import F32_TINY, INT32_MAX, REQUIRED, KeyReader, Required
from graphrt.ops import RopeParams
from graphrt.printing import brief

T = TypeVar("T", int, float, str, bool)

#: Factors that a context may be stretched by: published ones are 1 to 128.
LEAST_STRETCH, MOST_STRETCH = 1e-3, 1e6
ROPE_SCALINGS = ("none", "linear", "yarn")
#: By the number that files have for each, 1 and up. "chosen": a softmax of the chosen experts' logits alone.
GATINGS = ("softmax", "sigmoid", "chosen")
#: By the number that files have for each.
POOLINGS = ("none", "mean", "cls", "last", "rank")
NORM_EPS = {"rms": "attention.layer_norm_rms_epsilon", "layer": "attention.layer_norm_epsilon"}


class Keys:
    """The keys of one architecture: `keys.get("block_count", int)` reads "<arch>.block_count". Raises ArchError for a
    value of another type, that is not finite or out of its range (key_reader.py)."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.all = KeyReader(file.metadata, ArchError)
        self.arch = self.all.text("general.architecture")
        self._read: set[str] = set()

    def name(self, key: str) -> str:
        """The key in full; it counts as read."""
        self._read.add(key)
        return f"{self.arch}.{key}"

    def has(self, key: str) -> bool:
        return self.name(key) in self.file.metadata

    def unread(self) -> dict[str, Any]:
        """Keys with their values that nobody asked for, less those that change no result (hparam_keys.py)."""
        prefix = f"{self.arch}."
        mine = [key.removeprefix(prefix) for key in self.file.metadata if key.startswith(prefix)]
        rotates, slides = "rope.freq_base" in self._read, "attention.sliding_window" in self._read
        mixes = bool(self.get("expert_count", int, 0)) if "expert_count" in mine else False

        def counts(key: str) -> bool:
            idle = (key.startswith("rope.") and not rotates) or (key.endswith("_swa") and not slides)
            idle = idle or (key.startswith(OF_EXPERTS) and not mixes)
            return key not in self._read and not idle

        asked = {key: self.file.metadata[prefix + key] for key in mine if counts(key)}
        return {key: value for key, value in asked.items() if changes_the_result(key, value)}

    def get(self, key: str, kind: type[T], default: T | Required = REQUIRED) -> T:
        """The value, or `default` when the key is missing. A whole number is -1 to 2^32 - 1, a float one of f32's."""
        readers: dict[type, Callable[..., Any]] = {
            int: self.all.whole,
            float: self.all.real,
            bool: self.all.flag,
            str: self.all.text,
        }
        found: T = readers[kind](self.name(key), default)
        return found

    def count(self, key: str, default: int | Required = REQUIRED) -> int:
        """A whole number of at least 1."""
        return self.all.whole(self.name(key), default, 1, INT32_MAX)

    def amount(self, key: str, default: float | Required = REQUIRED) -> float:
        """A finite number of at least 0."""
        return self.all.real(self.name(key), default, 0.0)

    def positive(self, key: str, default: float | Required = REQUIRED) -> float:
        """A finite number over 0, of f32's normal ones."""
        return self.all.real(self.name(key), default, F32_TINY)

    def per_layer(self, key: str, n_layer: int, default: int | Required = REQUIRED) -> tuple[int, ...]:
        """A number for each layer: files give one for all, or an array with one a layer."""
        if self.file.metadata.array_length(self.name(key)) is None:
            return (self.count(key, default),) * n_layer
        values = self.all.numbers(self.name(key), "iu")
        assert values is not None
        if len(values) != n_layer or not 1 <= values.min() <= values.max() <= INT32_MAX:
            rule = f"{n_layer} numbers of at least 1, one a layer"
            raise ArchError(f"{self.name(key)} must be {rule}, got {len(values)}: {brief(values[:8].tolist())}")
        return tuple(values.tolist())


@dataclass(frozen=True)
class ExpertParams:
    """A mixture of experts. n, used: experts, and those that a token is given; n_ff: their width; gating: what makes
    probabilities of the router's logits, of GATINGS; norm: weights are divided by their sum; scale: on them, 1 for
    none; n_shared: experts that every token is given, as one of so many times the width; groups, groups_used: experts
    are chosen from the best groups only, 1 and 1 for no groups; n_dense: leading layers without experts; held: of the
    experts so many are here, 0 for all; shared_ff: the width of what every token is given, 0 for n_shared times n_ff.
    """

    n: int
    used: int
    n_ff: int
    gating: str
    norm: bool
    scale: float = 1.0
    n_shared: int = 0
    groups: int = 1
    groups_used: int = 1
    n_dense: int = 0
    held: int = 0
    shared_ff: int = 0


@dataclass(frozen=True)
class LatentParams:
    """Attention whose keys and values are one short row a token. n_kv: elements of that row, those that rotate come on
    top; n_q: of the row that queries are made of, 0 where they are made of the embedding; d_k, d_v: elements a head of
    k, rotated ones included, and of v, as if they were made of the row."""

    n_kv: int
    n_q: int
    d_k: int
    d_v: int


@dataclass(frozen=True)
class HParams:
    """What every architecture has. Sizes in elements; lists are one number a layer.

    n_head, n_head_kv: attention heads of queries and of keys/values; d_k, d_v: elements a head of k and of v;
    n_ff: feed-forward width; norm_eps: of the norms; rope: the rotation of global layers, None for none;
    attn_scale: on q.k; final_softcap: of the logits, 0 for none; window: how many tokens a layer with a sliding window
    sees; windowed: which layers have one; local_rope: the rotation of those, None for the global one; attn_softcap: of
    q.k, 0 for none; max_alibi_bias: ALiBi's, 0 for none; clamp_kqv: the most that q, k and v may be, 0 for no limit;
    logit_scale: on the logits, 0 for none; causal: a token sees none after it; cached: keys and values are kept, which
    encoders don't; pooling: of POOLINGS, how an embedding
    is made of those of a text's tokens, "" where the file is silent; n_token_types: rows of an encoder's token_types;
    experts: None for a model without; latent: None for attention with keys and values apart, else d_k and d_v are
    those of the one head that the cache holds, and v is the beginning of k.
    """

    arch: str
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_layer: int
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    n_ff: tuple[int, ...]
    d_k: int
    d_v: int
    norm_eps: float
    rope: RopeParams | None
    attn_scale: float
    final_softcap: float = 0.0
    window: int = 0
    windowed: tuple[bool, ...] = ()
    local_rope: RopeParams | None = None
    attn_softcap: float = 0.0
    max_alibi_bias: float = 0.0
    clamp_kqv: float = 0.0
    logit_scale: float = 0.0
    causal: bool = True
    cached: bool = True
    pooling: str = ""
    n_token_types: int = 0
    experts: ExpertParams | None = None
    latent: LatentParams | None = None


@dataclass(frozen=True)
class Traits:
    """What a family's name alone tells. norm: "rms" or "layer"; rope_mode: the pair order of its rotation, "normal" or
    "neox", None where it has none; scalings: of ROPE_SCALINGS, those it knows."""

    norm: str = "rms"
    rope_mode: str | None = "normal"
    scalings: tuple[str, ...] = ROPE_SCALINGS


def read_hparams(keys: Keys, traits: Traits) -> HParams:
    """The record of a file, but for what few families have.

    Raises ArchError for a key that is missing or no such value, that contradicts another or can't be honoured.
    """
    n_layer, n_embd = keys.count("block_count"), keys.count("embedding_length")
    if n_layer > MAX_LAYERS:
        raise ArchError(f"{keys.name('block_count')} must be at most {MAX_LAYERS}, got {n_layer}; the file is damaged")
    n_head = keys.per_layer("attention.head_count", n_layer)
    n_head_kv = keys.per_layer("attention.head_count_kv", n_layer, default=n_head[0])
    for heads, kv in zip(n_head, n_head_kv):
        if heads % kv:
            raise ArchError(f"the number of kv heads must divide the number of heads, got {kv} and {heads}")
    if not keys.has("attention.key_length") and n_embd % n_head[0]:
        raise ArchError(f"the head count must divide the embedding length, got {n_head[0]} and {n_embd}")
    d_k = keys.count("attention.key_length", n_embd // n_head[0])
    return HParams(
        arch=keys.arch,
        n_vocab=_n_vocab(keys),
        n_ctx_train=keys.count("context_length"),
        n_embd=n_embd,
        n_layer=n_layer,
        n_head=n_head,
        n_head_kv=n_head_kv,
        n_ff=keys.per_layer("feed_forward_length", n_layer),
        d_k=d_k,
        d_v=keys.count("attention.value_length", n_embd // n_head[0] if n_embd % n_head[0] == 0 else d_k),
        norm_eps=keys.amount(NORM_EPS[traits.norm]),
        rope=read_rope(keys, traits.rope_mode, d_k, traits.scalings) if traits.rope_mode else None,
        attn_scale=keys.get("attention.scale", float, 0.0) or d_k**-0.5,
        windowed=(False,) * n_layer,
        causal=keys.get("attention.causal", bool, True),
        pooling=_pooling(keys),
    )


def with_windows(
    hp: HParams, keys: Keys, period: int, local_rope: RopeParams | None = None, default: int = 0
) -> HParams:
    """The record with a sliding window on all layers but the last of each `period`, where the file names a window, or
    with `default` as the window where it names none.

    The file's own pattern, a period or a flag for each layer, goes first.
    """
    window = keys.all.whole(keys.name("attention.sliding_window"), default, -1, INT32_MAX)
    if window <= 0:
        return hp
    _refuse_other_sizes(hp, keys)
    return replace(hp, window=window, windowed=_windowed(hp.n_layer, keys, period), local_rope=local_rope)


def _windowed(n_layer: int, keys: Keys, period: int) -> tuple[bool, ...]:
    """Which layers have a window: all but the last of each so many, by the file's number or flags or else `period`."""
    key = keys.name("attention.sliding_window_pattern")
    if keys.file.metadata.array_length(key) is None:
        period = keys.all.whole(key, period, 0, INT32_MAX)
        return tuple(period == 0 or il % period < period - 1 for il in range(n_layer))
    flags = keys.all.numbers(key, "biu")
    assert flags is not None
    if len(flags) != n_layer:
        raise ArchError(f"the window pattern must have a flag for each of {n_layer} layers, got {len(flags)}")
    return tuple(bool(flag) for flag in flags)


def _refuse_other_sizes(hp: HParams, keys: Keys) -> None:
    """Heads of layers with a window are like all others."""
    sizes = {"attention.key_length_swa": hp.d_k, "attention.value_length_swa": hp.d_v}
    if hp.rope is not None:
        sizes["rope.dimension_count_swa"] = hp.rope.n_dims
    for key, size in sizes.items():
        found = keys.get(key, int, size)
        if found != size:
            raise ArchError(f"{keys.name(key)} must be {size}, as in layers without a window, got {found}")


def _n_vocab(keys: Keys) -> int:
    """As llama.cpp: the key, else the number of tokens, else the rows of the embedding."""
    if keys.has("vocab_size"):
        return keys.count("vocab_size")
    embedding = keys.file.tensors.get("token_embd.weight")
    n = keys.file.metadata.array_length("tokenizer.ggml.tokens")
    if n is None:
        n = embedding.ne[1] if embedding is not None and len(embedding.ne) > 1 else 0
    if not 1 <= n <= INT32_MAX:
        raise ArchError(f"a vocabulary must have a token, the file has neither {keys.name('vocab_size')} nor tokens")
    return n


def _pooling(keys: Keys) -> str:
    kind = keys.get("pooling_type", int, -1)
    if kind in (-1, 2**32 - 1):  # llama.cpp's number for none that is named
        return ""
    if not 0 <= kind < len(POOLINGS):
        known = ", ".join(f"{i} ({name})" for i, name in enumerate(POOLINGS))
        raise ArchError(f"{keys.name('pooling_type')} must be one of {known}, got {kind}; this pooling is not known")
    return POOLINGS[kind]


def refuse_variants(keys: Keys, variants: Mapping[str, str], activation: str) -> None:
    """Raises ArchError for keys that name what is not implemented: those of `variants` must be 0, and the activation
    the family's."""
    for key, what in variants.items():
        value = keys.get(key, int, 0)
        if value:
            raise ArchError(f"{keys.name(key)} must be 0, got {value}: {what} not implemented in {keys.arch} models")
    named = keys.get("hidden_activation", str, activation)
    if named != activation:
        raise ArchError(
            f"{keys.name('hidden_activation')} must be {activation!r}, the one that {keys.arch} has, got "
            f"{brief(named)}; this activation is not implemented there"
        )


def read_rope(keys: Keys, mode: str, d_k: int, scalings: Sequence[str] = ROPE_SCALINGS) -> RopeParams:
    """The rotation that a file's rope.* keys describe. Raises ArchError for a scaling that isn't known.

    YaRN's magnitude follows llama.cpp's context setup: what the op multiplies by itself is divided out first, so that
    plain YaRN ends with 0.1 ln(factor) + 1.
    """
    kind = keys.get("rope.scaling.type", str, "linear")
    if kind not in scalings:
        raise ArchError(
            f"{keys.name('rope.scaling.type')} must be one of {', '.join(scalings)}, got {brief(kind)}; "
            f"this rotation is not implemented"
        )
    factor = _stretch(keys, "rope.scaling.factor", _stretch(keys, "rope.scale_linear", 0.0))
    n_dims = keys.count("rope.dimension_count", d_k)
    base = keys.positive("rope.freq_base", 10000.0)
    if n_dims > d_k or n_dims % 2:
        raise ArchError(f"{keys.name('rope.dimension_count')} must be even and at most {d_k}, got {n_dims}")
    mix = keys.get("rope.scaling.yarn_ext_factor", float, 1.0) if kind == "yarn" else 0.0
    scale = 1.0 if kind == "none" or factor == 0.0 else 1.0 / factor
    magnitude = max(1.0, yarn_mscale(scale)) / yarn_mscale(scale) if mix else 1.0
    return RopeParams(
        n_dims=n_dims,
        mode=mode,
        freq_base=base,
        freq_scale=scale,
        n_ctx_orig=keys.count("rope.scaling.original_context_length", keys.count("context_length")),
        ext_factor=mix,
        attn_factor=magnitude * keys.get("rope.scaling.attn_factor", float, 1.0),
        beta_fast=keys.positive("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.positive("rope.scaling.yarn_beta_slow", 1.0),
    )


def _stretch(keys: Keys, key: str, default: float) -> float:
    """By how much positions are squeezed, 0 for not at all. Its inverse and, of YaRN, its logarithm are taken."""
    factor = keys.amount(key, default)
    if factor and not LEAST_STRETCH <= factor <= MOST_STRETCH:
        raise ArchError(
            f"{keys.name(key)} must be 0 or {LEAST_STRETCH:g} to {MOST_STRETCH:g}, got {factor}; the file is damaged"
        )
    return factor


def yarn_mscale(freq_scale: float, multiplier: float = 1.0) -> float:
    """0.1 m ln(factor) + 1: what YaRN with a factor of 1 / freq_scale makes attention sharper by."""
    return 0.1 * multiplier * math.log(1.0 / freq_scale) + 1.0
