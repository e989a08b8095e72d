"""What one input may take before it is a finding."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Limits:
    """cpu: seconds of CPU; hang: seconds in which the child does nothing but sleep; memory: bytes of growth over what
    it held before; address_space: bytes of growth before an allocation fails, so that one by a hostile number fails at
    once and needs no memory; file: bytes that it may write to one file."""

    cpu: float = 5.0
    hang: float = 60.0
    memory: int = 300 << 20
    address_space: int = 1 << 30
    file: int = 64 << 20

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Limits:
        return cls(**json.loads(text))
