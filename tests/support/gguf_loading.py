"""GGUF files from memory, as tests of the loader open them."""

from __future__ import annotations

import pytest

from graphrt.errors import GGUFError
from graphrt.models.gguf import GGUFFile
from support.gguf_files import (
    Built,
    build,
    sample_kv,
    sample_tensors,
)


def sample() -> Built:
    return build(sample_kv(), sample_tensors())


def load(data: bytes | bytearray) -> GGUFFile:
    return GGUFFile.from_bytes(data)


def refused(data: bytes | bytearray) -> str:
    """The message of the GGUFError that loading and touching everything must raise; checked for its form."""
    with pytest.raises(GGUFError) as caught, load(data) as f:
        for name in f.tensors:
            f.data(name)
    message = str(caught.value)
    assert 1 <= len(message.splitlines()) <= 3
    return message
