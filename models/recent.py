"""Recent: what was made for the keys that were asked for last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """At most `size` values by their keys, which weigh at most `most` unless one alone does; the one that was asked for
    longest ago goes first. (functools.lru_cache on a method would keep its object alive until the garbage collector
    looks, and with it what lies on a GPU.) n_made: values made so far."""

    def __init__(self, size: int, most: int = 0, weigh: Callable[[V], int] = lambda value: 0) -> None:
        super().__init__()
        self.size, self.most, self.weigh = size, most, weigh
        self.n_made = 0

    def made(self, key: K, make: Callable[[], V]) -> V:
        """The value of a key, made now if it isn't there."""
        if key not in self:
            self[key] = make()
            self.n_made += 1
            while len(self) > 1 and (len(self) > self.size or sum(map(self.weigh, self.values())) > self.most):
                self.popitem(last=False)
        self.move_to_end(key)
        return self[key]
