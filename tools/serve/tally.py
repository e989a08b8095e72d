"""Tally: a histogram that costs a step little, where prometheus_client's takes a lock and some microseconds a value."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import Metric
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

#: Upper ends of what a server's answers take, and of what its steps take: seconds.
ANSWERS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40, 80)
STEPS = (
    0.0001, 0.0002, 0.0003, 0.0005, 0.0007, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.012,
    0.016, 0.02, 0.025, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5,
)  # fmt: skip
#: The same of waiting, which is short or long.
WAITS = (*STEPS, 10, 20, 40, 80)
#: The same of tokens in a step, and of those in a text.
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
LENGTHS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000,
)  # fmt: skip
#: The same of texts that are made of one prompt.
CHOICES = (1, 2, 5, 10, 20, 50, 100)


class Tally(Collector):
    """Values by the ranges that they lie in. edges: the upper ends, which belong to their ranges. One thread adds; what
    another reads meanwhile may lack the latest."""

    def __init__(self, name: str, what: str, edges: Sequence[float]) -> None:
        self.name, self.what, self.edges = name, what, [float(edge) for edge in edges]
        self.counts, self.sum = [0] * (len(edges) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.sum += value

    def collect(self) -> Iterator[Metric]:
        """As Prometheus has it: how many values are at most as large as each edge."""
        found, total = list[tuple[str, float]](), 0
        for edge, count in zip([*map(str, self.edges), "+Inf"], self.counts):
            total += count
            found.append((edge, total))
        yield HistogramMetricFamily(self.name, self.what, buckets=found, sum_value=self.sum)
