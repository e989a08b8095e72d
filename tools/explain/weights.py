"""Of matrix products: how their weights lie."""

from __future__ import annotations

from dataclasses import dataclass

from graphrt.execute import Executable
from graphrt.tools.explain.steps import Step


@dataclass(frozen=True)
class WeightInfo:
    """name; kind: its type; rows, k; planes: how it lies, "" for as in the file; nbytes: in memory."""

    name: str
    kind: str
    rows: int
    k: int
    planes: str
    nbytes: int

    @property
    def bytes_per_element(self) -> float:
        return self.nbytes / (self.rows * self.k)


def weights_of(step: Step, exe: Executable) -> list[WeightInfo]:
    """The matrices that a step's products multiply with."""
    found = []
    for node in step.nodes:
        if node.op in ("MUL_MAT", "MUL_MAT_ID"):
            w = node["weights"]
            buffer = exe.place(w)[0]
            nbytes = buffer.footprint if buffer.layout else w.nbytes
            found.append(WeightInfo(w.name, w.dtype.name, w.n_elements // w.ne[0], w.ne[0], buffer.layout, nbytes))
    return found
