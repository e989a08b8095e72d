"""What a model and its cache take of a device's memory, said before any of it is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from graphrt.backend import Backend, Usage
from graphrt.errors import MemoryPlanError
from graphrt.models.arch import read_file
from graphrt.models.cache import KVCache
from graphrt.models.engine import SessionOptions, check_options
from graphrt.models.gguf import GGUFFile
from graphrt.models.hparams import HParams
from graphrt.models.paged_steps import new_cache
from graphrt.models.placement import for_cache, for_weights
from graphrt.models.ranks.report import rank_part
from graphrt.ranks import Ranks


class _Nowhere:
    """Takes a cache's requests for memory and gives none: its shapes remain."""

    def alloc(self, nbytes: int, usage: Usage) -> None:
        return None


def cache_bytes(hp: HParams, options: SessionOptions, n_seq: int = 1) -> int:
    """Bytes of a session's cache or, over pages, of an engine's of n_seq sequences; encoders have none. Raises
    SessionError for options that can't be."""
    if not hp.cached:
        return 0
    n_ctx, n_batch = check_options(options, hp)
    nowhere = cast(Backend, _Nowhere())
    if options.page:
        return new_cache(hp, nowhere, replace(options, n_ctx=n_ctx, n_batch=n_batch), n_seq).nbytes
    return KVCache(hp, nowhere, hp.windowed, n_ctx, n_batch, options.type_k, options.type_v).nbytes


def weights_bytes(file: GGUFFile) -> int:
    """Bytes of all tensors: a model whose file has one that it never asks for is refused."""
    return sum(t.nbytes for t in file.tensors.values())


@dataclass(frozen=True)
class MemoryNeeds:
    """What a run takes on the device that multiplies with the weights, in bytes.

    weights: of the file's tensors; in_place: they are read where the file is mapped, and take no memory of their own;
    cache: of n_ctx tokens, or of the pages that n_seq sequences of so many share, 0 where another device holds it;
    page: tokens of a page, 0 for none; free, total: the device's memory, 0 where unknown; hp: of the model, or of the
    part of it that weights and cache are of; copied: of the weights, where others are read in place; ranks: how many
    have a part each.
    """

    device: str
    weights: int
    in_place: bool
    cache: int
    n_ctx: int
    types: tuple[str, str]
    free: int
    total: int
    hp: HParams = field(repr=False)
    n_seq: int = 1
    page: int = 0
    copied: int = 0
    ranks: int = 1

    @property
    def taken(self) -> int:
        """Bytes that must be allocated, at least: work memory and kernels come on top."""
        return self.cache + (self.copied if self.in_place else self.weights)

    def facts(self) -> dict[str, Any]:
        """All of it but the hyperparameters, for JSON."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "hp"}

    @property
    def limit(self) -> int:
        """The most that can be had, 0 where unknown. What a host's files occupy gives way, so there it is the total."""
        return self.total if self.in_place else self.free

    def __str__(self) -> str:
        mapped = " (read in place)" if self.in_place else ""
        if self.copied:
            mapped = f" ({_size(self.weights - self.copied)} read in place)"
        part = f"a rank of {self.ranks}: " if self.ranks > 1 else ""
        kinds = self.types[0] if self.types[0] == self.types[1] else "/".join(self.types)
        have = f" | free {_size(self.free)} of {_size(self.total)} on {self.device}" if self.total else ""
        many = f"{self.n_seq} sequences of up to " if self.n_seq > 1 else ""
        pages = f" in pages of {self.page}" if self.page else ""
        held = f"{many}{self.n_ctx} tokens{pages}, {kinds}"
        return f"{part}weights {_size(self.weights)}{mapped} | KV {_size(self.cache)} ({held}){have}"


def memory_needs(
    file: GGUFFile, backends: Sequence[Backend], options: SessionOptions, n_seq: int = 1, ranks: Ranks | None = None
) -> MemoryNeeds:
    """What a model on these backends and one session, or with pages an engine of n_seq sequences, will take. Allocates
    nothing. ranks: of a rank's part, this one's.

    Raises GGUFError and ArchError for a file that is no such model, SessionError for options that it can't have.
    """
    hp, weights, copied = (read_file(file), weights_bytes(file), 0) if ranks is None else rank_part(file, ranks)
    home = for_weights(backends)
    here = for_cache(backends, options.type_k) is home
    n_ctx, _ = check_options(options, hp)
    first = next(iter(file.tensors), None)
    in_place = first is not None and home.wrap_host(file.data(first)) is not None
    device = home.device
    return MemoryNeeds(
        device=device.name if device else home.name,
        weights=weights,
        in_place=in_place,
        cache=cache_bytes(hp, options, n_seq) if here else 0,
        n_ctx=n_ctx,
        types=(options.type_k, options.type_v),
        free=device.memory_free if device else 0,
        total=device.memory_total if device else 0,
        hp=hp,
        n_seq=n_seq,
        page=options.page,
        copied=copied if in_place else 0,
        ranks=1 if ranks is None else ranks.size,
    )


def check_fits(needs: MemoryNeeds, options: SessionOptions) -> None:
    """Raises MemoryPlanError with the figures and what takes less, when the device has too little memory."""
    if not needs.limit or needs.taken <= needs.limit:
        return
    held = "" if needs.in_place else f"{_size(needs.weights)} of weights and "
    advice = "; ".join([*_smaller_caches(needs.hp, needs, options), *_smaller_weights(needs)])
    raise MemoryPlanError(
        f"what a model needs must fit in the memory of {needs.device}: {held}{_size(needs.cache)} of cache for "
        f"{needs.n_ctx} tokens take {_size(needs.taken)}, and {_size(needs.limit)} of {_size(needs.total)} can be had"
        + (f".\n{advice}" if advice else "")
    )


def _smaller_caches(hp: HParams, needs: MemoryNeeds, options: SessionOptions) -> list[str]:
    """Settings with which the rest would suffice for the cache."""
    room = needs.limit - (needs.taken - needs.cache)
    found = []
    small = replace(options, type_k="q8_0", type_v="q8_0")
    blocks = hp.d_k % 32 == hp.d_v % 32 == 0
    if blocks and cache_bytes(hp, small, needs.n_seq) <= min(room, needs.cache - 1):
        found.append(f"type_k and type_v of q8_0 (a cache of {_size(cache_bytes(hp, small, needs.n_seq))}) fits")
    name = "n_pages" if options.page and options.n_pages else "n_ctx"
    most = _largest(hp, options, name, room, options.n_pages if name == "n_pages" else needs.n_ctx, needs.n_seq)
    if most:
        found.append(f"an {name} of at most {most} fits")
    return found


def _largest(hp: HParams, options: SessionOptions, name: str, room: int, most: int, n_seq: int) -> int:
    """The largest number for an option, n_ctx or n_pages, whose cache fits in `room`, 0 for none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        changed = replace(options, n_pages=middle) if name == "n_pages" else replace(options, n_ctx=middle)
        if cache_bytes(hp, changed, n_seq) <= room:
            low = middle
        else:
            high = middle - 1
    return low


def _smaller_weights(needs: MemoryNeeds) -> list[str]:
    if needs.in_place:
        return []
    return ["use a smaller quantization of the model, free memory that others hold, or run it on the CPU"]


def _size(n: int) -> str:
    return f"{n / 2**30:.2f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB" if n >= 2**20 else f"{n / 2**10:.1f} KiB"
