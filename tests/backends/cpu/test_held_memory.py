"""What the CPU backend holds: memory goes back as soon as its user is gone, and no call leaves any behind."""

from __future__ import annotations

import gc
import mmap
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.tiny import write_model

from graphrt import Graph, get_backend, new_input, ops, prepare
from graphrt.backend import Usage
from graphrt.backends.cpu import memory
from graphrt.errors import MemoryPlanError
from graphrt.models import Model, SamplerParams, engine, load
from graphrt.models.engine import SessionOptions


class Held:
    """Bytes of the backend's own memory that are alive."""

    def __init__(self) -> None:
        self.bytes = self.largest = 0

    def mmap(self, fileno: int, nbytes: int) -> mmap.mmap:
        made = mmap.mmap(fileno, nbytes)
        self.bytes += nbytes
        self.largest = max(self.largest, self.bytes)
        weakref.finalize(made, self._freed, nbytes)
        return made

    def _freed(self, nbytes: int) -> None:
        self.bytes -= nbytes


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """All of the backend's memory is counted, and nothing is given back by the garbage collector's help."""
    counted = Held()
    monkeypatch.setattr(memory, "MAPPED_BYTES", 1)
    monkeypatch.setattr(memory, "mmap", SimpleNamespace(mmap=counted.mmap))
    gc.collect()
    gc.disable()
    yield counted
    gc.enable()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("n_tokens", [1, 40])
def test_an_executables_memory_goes_with_it(exact: bool, n_tokens: int, held: Held) -> None:
    x, ids = new_input("f32", 64, n_tokens, name="x"), new_input("i32", 2, n_tokens, name="ids")
    experts = ops.mul_mat_id(new_input("q8_0", 64, 32, 4, name="experts"), ops.reshape(x, 64, 1, n_tokens), ids)
    gate, up = (ops.mul_mat(new_input("q8_0", 64, 32, name=name), x) for name in ("gate", "up"))
    exe = prepare(Graph(ops.glu(gate, up, "swiglu"), experts), get_backend("cpu", exact=exact))
    for leaf in exe.graph.inputs:
        exe.write(
            leaf, np.zeros(leaf.data_nbytes, np.uint8) if leaf.dtype.is_quantized else np.zeros(leaf.shape, np.int32)
        )
    exe.run()
    assert held.bytes > 0
    del exe
    assert held.bytes == 0


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("held") / "m.gguf", "llama", tokenizer="spm")


def _generate(model: Model, n_prompt: int) -> None:
    tokens = [1 + i % 90 for i in range(n_prompt)]
    assert len(list(model.generate(tokens, 3, sampling=SamplerParams(seed=1), ignore_eos=True))) == 3


def test_no_call_of_generate_leaves_memory_behind(path: Path, held: Held) -> None:
    model = load(path, "cpu")
    assert held.bytes == 0, "weights are the mapped file"
    _generate(model, 70)
    most = held.largest
    for n_prompt in (3, 17, 40, 64, 5, 30):
        _generate(model, n_prompt)
        assert held.bytes == 0
    assert held.largest == most, "one session at a time, the longest prompt's the largest"
    session = model.session(SessionOptions(n_batch=16))
    session.eval(list(range(1, 40)))
    assert held.bytes > 0
    del session
    assert held.bytes == 0


def test_a_session_keeps_the_latest_lengths_of_prompts_alone(
    path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "MAX_PREPARED", 2)
    session, after = load(path, "cpu").session(SessionOptions(n_ctx=64)), []
    for n_prompt in (9, 10, 11, 12, 9, 10, 11, 12):
        session.reset()
        session.eval([1] * n_prompt)
        after.append(held.bytes)
    assert after[3] == after[7], "steps that were prepared long ago are given back"


def test_the_file_is_closed_with_its_model(path: Path) -> None:
    gc.collect()
    model = load(path, "cpu")
    _generate(model, 30)
    file, network = weakref.ref(model.file), weakref.ref(model.network)
    mapped = [
        weakref.ref(buffer) for buffer in {id(t.buffer): t.buffer for t in model.weights.loaded.values()}.values()
    ]
    gc.disable()
    try:
        del model
        assert file() is None and network() is None and all(buffer() is None for buffer in mapped)
    finally:
        gc.enable()


def test_a_weight_is_the_files_own_pages(path: Path) -> None:
    """So that processes that load one file share its memory."""
    model = load(path, "cpu")
    for name, leaf in model.weights.loaded.items():
        assert leaf.buffer is not None
        view, data = leaf.buffer.host_view(), model.file.data(name)
        assert view is not None and view.ctypes.data == data.ctypes.data and not view.flags.owndata


@pytest.mark.parametrize("nbytes", [1, memory.MAPPED_BYTES - 1, memory.MAPPED_BYTES, memory.MAPPED_BYTES + 1])
def test_new_memory_is_aligned_and_filled(nbytes: int) -> None:
    for usage, value in ((Usage.STATE, 0), (Usage.COMPUTE, 0xFF)):
        buffer = memory.allocate(nbytes, usage)
        assert buffer.memory.data_ptr() % 64 == 0 and buffer.nbytes == nbytes
        assert bool((buffer.memory == value).all())


@pytest.mark.parametrize("nbytes", [1 << 56, 1 << 62, 1 << 70])
def test_memory_that_is_not_there_is_refused(nbytes: int) -> None:
    with pytest.raises(MemoryPlanError, match="can't be had on the CPU"):
        memory.allocate(nbytes, Usage.STATE)
