"""FairQueue: what waits, by who asked: one of each in turn, so that nobody's thousand requests keep another's one."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items of several keys. Those of one key come in the order in which they were put in, keys come in turn."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[T]] = OrderedDict()
        self._n = 0  # other threads ask for it

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[T]:
        return (item for line in self._lines.values() for item in line)

    def put(self, key: str, item: T) -> None:
        """As the last of its key; a key that is new comes after the others."""
        self._n += 1
        self._lines.setdefault(key, deque()).append(item)

    def put_first(self, key: str, item: T) -> None:
        """As the next of all."""
        self._n += 1
        self._lines.setdefault(key, deque()).appendleft(item)
        self._lines.move_to_end(key, last=False)

    def remove(self, key: str, item: T) -> bool:
        """Whether it was there."""
        line = self._lines.get(key, deque())
        if item not in line:
            return False
        self._n -= 1
        line.remove(item)
        if not line:
            del self._lines[key]
        return True

    def take(self, is_ready: Callable[[T], bool] = lambda item: True) -> T | None:
        """The next item that is ready, whose key is the last then; None where none is. A key's later items do not go
        before its first one, but for one that isn't ready."""
        for key, line in self._lines.items():
            item = next(filter(is_ready, line), None)
            if item is not None:
                self._n -= 1
                line.remove(item)
                if line:
                    self._lines.move_to_end(key)
                else:
                    del self._lines[key]
                return item
        return None
