"""What prompts began with, as a file for each of several ranks, which has its own part of the rows (prefix_file.py).

All ranks must know the same of a prompt: what one knows it doesn't read, and others would wait for it. So either all
have taken their files, of the same prompts, or none has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from graphrt.errors import SessionError
from graphrt.models.engine_paged import PagedEngine
from graphrt.models.paging.pool import PagePool
from graphrt.models.prefix_file import load_prefixes, page_bytes, save_prefixes
from graphrt.ranks import Ranks


def save_on_all(ranks: Ranks, engine: PagedEngine, path: Path, most: int) -> int:
    """save_prefixes() of each rank's engine, when all have made the same steps: of the same prompts, whose rows on all
    ranks together fit `most` bytes. path: this rank's. Raises SessionError on all ranks where one can't write."""
    everyones = ranks.everyones(page_bytes(engine))
    costs = {kind: sum(each[kind] for each in everyones) for kind in everyones[0]}
    n, failed = _tried(lambda: save_prefixes(engine, path, most, costs))
    _check_none_failed(ranks.everyones(failed))
    return n


def load_on_all(ranks: Ranks, engine: PagedEngine, path: Path) -> int:
    """load_prefixes() of each rank's engine. path: this rank's. Raises SessionError on all ranks where one can't take
    its file, or has one of other prompts than others have; then nothing is known."""
    n, failed = _tried(lambda: load_prefixes(engine, path))
    everyones = ranks.everyones((failed, digest_of(engine.cache.pool)))
    try:
        _check_none_failed([each for each, _ in everyones])
        if len({digest for _, digest in everyones}) > 1:
            raise SessionError(
                f"files of prompts must be of the same prompts on all ranks, those beside {path.name!r} are not: one "
                f"is missing, or they are of several servers; delete all of them"
            )
    except SessionError:
        engine.cache.pool.forget()
        raise
    return n


def digest_of(pool: PagePool) -> bytes:
    """Pools without sequences that have the same one know the same texts, and from then on give out and take back the
    same pages. Their numbers count: a step reads sequences in the order of the pages that they share."""
    numbers, said = {id(pool.root): 0}, list[object]()
    for node in pool.root.below():
        said.append((numbers[id(node.parent)], node.key, sorted(node.pages.items())))
        numbers[id(node)] = len(numbers)
    said += [(kind, pages.free, list(pages.idle)) for kind, pages in pool.kinds.items()]
    return hashlib.sha256(repr(said).encode()).digest()


def _tried(work: Callable[[], int]) -> tuple[int, str]:
    """What it gives, and why it failed, "" if it didn't: a rank that raised at once would leave the others waiting."""
    try:
        return work(), ""
    except SessionError as error:
        return 0, str(error)


def _check_none_failed(everyones: Sequence[str]) -> None:
    for rank, failed in enumerate(everyones):
        if failed:
            raise SessionError(f"rank {rank} of {len(everyones)}: {failed}")
