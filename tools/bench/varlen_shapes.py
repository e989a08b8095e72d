"""The shapes of `graphrt bench op FLASH_ATTN_VARLEN`: tables pa_decode (a step of single tokens) and pa_prefill.

Models' heads are those of their files (models/synthetic_recipes.py): Llama 3.1 8B, gpt-oss-20b, latent attention as
DeepSeek has it, bge-small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphrt.dtypes import dtype
from graphrt.errors import GraphError
from graphrt.tools.bench.models import heads_of

TABLES = ("pa_decode", "pa_prefill")
#: By model: heads of q and of k, head sizes of k and v.
HEADS = {
    "llama-8b": (32, 8, 128, 128), "gpt-oss-20b": (64, 8, 64, 64), "deepseek": (64, 1, 576, 512),
    "bge-small": (12, 12, 32, 32),
}  # fmt: skip


@dataclass(frozen=True)
class VarlenShape:
    """seqs: queries and keys of each sequence. page: 0 for packed keys; "contiguous": FLASH_ATTN_EXT over caches that
    lie in one piece, all of one length, sequences that are not being padded to the longest. beside: the name of the
    shape whose speed this one is told as a share of.
    shared: keys at the beginning, whole pages, that all sequences have in common; told: the op is told of
    them. mask: "new" or "keys": an explicit mask with columns of these, which hides nothing."""

    table: str
    name: str
    model: str
    seqs: tuple[tuple[int, int], ...]
    page: int = 16
    kv_type: str = "f16"
    causal: bool = True
    contiguous: bool = False
    beside: str = ""
    shared: int = 0
    told: bool = True
    mask: str = ""

    @property
    def heads(self) -> tuple[int, int, int, int]:
        """n_head, n_head_kv, D_k, D_v."""
        return HEADS[self.model] if self.model in HEADS else heads_of(self.model)

    @property
    def n_tokens(self) -> int:
        return sum(n for n, _ in self.seqs)

    @property
    def longest(self) -> int:
        return max(length for _, length in self.seqs)

    @property
    def ragged(self) -> bool:
        return len({length for _, length in self.seqs}) > 1

    @property
    def padded(self) -> bool:
        """Sequences of different lengths lie as if all were as long as the longest."""
        return self.contiguous and self.ragged

    @property
    def firsts(self) -> list[int]:
        """Where the queries of each sequence begin, and how many there are with what is padded."""
        sizes = [self.longest if self.padded else n for n, _ in self.seqs]
        return [sum(sizes[:i]) for i in range(len(sizes) + 1)]

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        return sum(n * length - (n * (n - 1) // 2 if self.causal else 0) for n, length in self.seqs)

    @property
    def flops(self) -> int:
        """Of what is seen: half of a causal square."""
        n_head, _, d_k, d_v = self.heads
        return 2 * (d_k + d_v) * n_head * self.pairs

    @property
    def cache_bytes(self) -> int:
        """Of the keys and values that there are, shared ones and V in K counted once."""
        _, n_head_kv, d_k, d_v = self.heads
        width = d_k + (0 if d_k == 576 else d_v)
        keys = self.shared + sum(length - self.shared for _, length in self.seqs)
        return dtype(self.kv_type).row_size(width * n_head_kv) * keys

    @property
    def bytes(self) -> int:
        """What must move: keys and values, queries, results, and the table's entries that are read."""
        n_head, _, d_k, d_v = self.heads
        table = 4 * sum(-(-length // self.page) for _, length in self.seqs) if self.page else 0
        return self.cache_bytes + 4 * n_head * self.n_tokens * (d_k + d_v) + table


def _ragged(n: int, low: int, high: int) -> list[int]:
    """n lengths from low to high, spread evenly and in no order."""
    return [low + (high - low) * (i * 37 % n) // max(n - 1, 1) for i in range(n)]


def _decode(name: str, model: str, lengths: Sequence[int], page: int, beside: str = "", **more: object) -> VarlenShape:
    return replace(VarlenShape("pa_decode", name, model, tuple((1, n) for n in lengths), page, beside=beside), **more)  # type: ignore[arg-type]


def _prefill(name: str, seqs: Sequence[tuple[int, int]], model: str = "llama-8b", **more: object) -> VarlenShape:
    return replace(VarlenShape("pa_prefill", name, model, tuple(seqs)), **more)  # type: ignore[arg-type]


def _shapes() -> list[VarlenShape]:
    one, mla = [65536], [8192] * 32
    found = [_decode("decode 1x65536 contiguous", "llama-8b", one, 16, contiguous=True)]
    found += [
        _decode(f"decode 1x65536 page {p}", "llama-8b", one, p, "decode 1x65536 contiguous") for p in (16, 64, 256)
    ]
    found.append(_decode("decode 64x100..16000 page 16", "llama-8b", _ragged(64, 100, 16000), 16))
    found.append(_decode("decode 8x32768 page 16", "llama-8b", [32768] * 8, 16))
    plain = "decode 64x2048 page 16"
    found.append(_decode(plain, "llama-8b", [2048] * 64, 16))
    for kind in ("f8_e4m3", "q8_0", "q4_0"):
        found.append(_decode(f"{plain} {kind}", "llama-8b", [2048] * 64, 16, plain, kv_type=kind))
    found += [_decode(f"decode {n}x4096 page 16", "gpt-oss-20b", [4096] * n, 16) for n in (1, 8, 64, 256)]
    found.append(_decode("mla 32x8192 contiguous", "deepseek", mla, 64, contiguous=True))
    found += [_decode(f"mla 32x8192 page {p}", "deepseek", mla, p, "mla 32x8192 contiguous") for p in (16, 64, 128)]
    own = [10240] * 64
    found.append(_decode("decode 64x10240 page 16", "llama-8b", own, 16))
    for told in (False, True):
        name = f"decode 64x2048 after 8192 shared, {'told' if told else 'not told'}"
        found.append(_decode(name, "llama-8b", own, 16, "decode 64x10240 page 16", shared=8192, told=told))
    lengths = _ragged(32, 64, 4096)
    # As much work in equal lengths: sequences of the root of the mean square.
    equal = round((sum(n * n for n in lengths) / len(lengths)) ** 0.5)
    found.append(_prefill("prefill 32 equal lengths", [(equal, equal)] * 32))
    found.append(_prefill("prefill 32x64..4096 page 16", [(n, n) for n in lengths], beside="prefill 32 equal lengths"))
    found.append(_prefill("prefill 512 after 16384 contiguous", [(512, 16896)], contiguous=True))
    for page in (16, 128):
        name = f"prefill 512 after 16384 page {page}"
        found.append(_prefill(name, [(512, 16896)], page=page, beside="prefill 512 after 16384 contiguous"))
    mixed = [(512, 4096), (512, 512), *((1, n) for n in _ragged(62, 100, 8000))]
    found.append(_prefill("mixed 2 prompts and 62 tokens page 16", mixed))
    texts = [(n, n) for n in _ragged(64, 128, 512)]
    dense, encoder = "encoder 64 texts padded, with a mask", {"page": 0, "causal": False, "kv_type": "f32"}
    found.append(_prefill(dense, texts, "bge-small", contiguous=True, **encoder))
    found.append(_prefill("encoder 64 texts of 128..512 packed", texts, "bge-small", beside=dense, **encoder))
    # Drafted tokens of 16 texts: a tree each, whose mask is beside the rule of positions.
    tree = [(16, 4096)] * 16
    found.append(_prefill("drafts 16x16 after 4080 page 16, causal", tree))
    beside = {"beside": "drafts 16x16 after 4080 page 16, causal"}
    for columns in ("new", "keys"):
        found.append(_prefill(f"drafts 16x16 after 4080 page 16, mask of {columns}", tree, mask=columns, **beside))
    return found


SHAPES = _shapes()


#: Sequences of a step, and tokens of a prompt, of the tables of a model by name.
_STEPS, _PROMPTS, _CONTEXT = (1, 2, 4, 8, 16, 32, 64, 128, 256), (1024, 4096, 16384), 4096


def model_shapes(model: str) -> list[VarlenShape]:
    """pa_decode and pa_prefill of a model. Raises GraphError for a name that is no recipe's."""
    heads_of(model)
    steps = [_decode(f"decode {n}x{_CONTEXT} page 16", model, [_CONTEXT] * n, 16) for n in _STEPS]
    return [*steps, *(_prefill(f"prefill {n} page 16", [(n, n)], model) for n in _PROMPTS)]


def shapes_of(part: str, model: str | None = None) -> list[VarlenShape]:
    """Those with `part` in their table or name, and those whose share they are told as. model: its tables instead of
    all. Raises GraphError for none."""
    everything = SHAPES if model is None else model_shapes(model)
    chosen = [s for s in everything if part.lower() in f"{s.table} {s.name}".lower()]
    if not chosen:
        raise GraphError(f"a shape's table or name must have {part[:80]!r} in it, none does; --list shows them")
    wanted = {name for s in chosen for name in (s.name, s.beside)}
    return [s for s in everything if s.name in wanted]


def tiny(shapes: Sequence[VarlenShape]) -> list[VarlenShape]:
    """The same with few and short sequences, for a CPU."""
    return [
        replace(
            s,
            seqs=tuple((-(-n // 128), max(-(-n // 128), length // 128, 1)) for n, length in s.seqs[:4]),
            shared=s.shared // 128,
        )
        for s in shapes
    ]
