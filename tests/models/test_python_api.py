"""What people type in Python and in notebooks: load, chat, what objects say of themselves, several threads."""

from __future__ import annotations

import threading
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from support.tiny import CHAT, IM_END, tokens, write_model

import graphrt
from graphrt import Graph, models, new_input, ops
from graphrt.drawing import MAX_LINES
from graphrt.errors import ChatTemplateError, GGUFError, HubError, SessionError
from graphrt.models import Model, SamplerParams, hub
from graphrt.models.engine import SessionOptions

GREEDY = SamplerParams(temp=0.0)
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("api") / "spm.gguf", "llama", tokenizer="spm", chat=CHAT)


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return graphrt.load(path, "cpu")


# ---- load ----


def test_load_takes_names_and_paths(path: Path, model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = model.logits([1, 5])
    asked: list[str] = []
    monkeypatch.setattr(hub, "pull", lambda name: asked.append(name) or path)
    for name in (str(path), path, "smollm2-135m", "hf:some/model/file.gguf", None):
        assert np.array_equal(graphrt.load(name, "cpu").logits([1, 5]), rows)
    assert asked == ["smollm2-135m", "hf:some/model/file.gguf", hub.DEFAULT_MODEL]
    with pytest.raises(HubError, match="no such file"):
        graphrt.load(tmp_path / "none.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"no model")
    with pytest.raises(GGUFError):
        graphrt.load(tmp_path / "bad.gguf")


def test_completion_shows_what_is_public() -> None:
    assert set(graphrt.__all__) | {"ops", "models", "errors"} <= set(dir(graphrt))
    assert all(hasattr(graphrt, name) for name in dir(graphrt)) and "os" not in dir(graphrt)
    assert dir(models) == sorted(models.__all__)


# ---- chat ----


def test_chat_is_generate_through_the_template(model: Model) -> None:
    wanted = model.generate(model.prompt_tokens("hello", raw=False), 8, sampling=GREEDY, ignore_eos=True)
    text = "".join(piece.text for piece in wanted)
    assert model.chat(HELLO, 8, sampling=GREEDY, ignore_eos=True) == text
    stream = model.chat(HELLO, 8, stream=True, sampling=GREEDY, ignore_eos=True)
    assert "".join(piece.text for piece in stream) == text


def test_a_conversation_in_a_session_reads_what_is_new(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    session, turns, run = model.session(SessionOptions(n_ctx=200)), list(HELLO), graphrt.Executable.run
    read: list[int] = []

    def counted(exe: graphrt.Executable) -> None:
        positions = exe.graph.tensor("inp_pos")
        assert positions is not None
        read.append(positions.ne[0])
        run(exe)

    monkeypatch.setattr(graphrt.Executable, "run", counted)
    for turn in range(3):
        fresh = model.chat(turns, 6, sampling=GREEDY, ignore_eos=True)
        whole = read[0]
        read.clear()
        assert model.chat(turns, 6, session=session, sampling=GREEDY, ignore_eos=True) == fresh
        assert session.n_past == whole + 6 and (read[0] == whole if turn == 0 else read[0] < whole - 20)
        read.clear()
        turns += [{"role": "assistant", "content": fresh}, {"role": "user", "content": "the sea"}]


def test_conversations_that_can_not_be(model: Model, path: Path) -> None:
    with pytest.raises(SessionError, match="must have a message, got none"):
        model.chat([])
    with pytest.raises(ChatTemplateError, match="mapping with role and content"):
        model.chat([{"role": "user"}])
    with pytest.raises(SessionError, match="holds 256 tokens, got a text of 100000 characters"):
        model.chat([{"role": "user", "content": "x" * 100_000}])
    plain = graphrt.load(write_model(path.parent / "plain.gguf", "llama", tokenizer="spm"), "cpu")
    with pytest.raises(SessionError, match="needs a model with a chat template, this file has none; use generate"):
        plain.chat(HELLO)
    assert IM_END not in model.chat(HELLO, 4)


# ---- what objects say of themselves ----


def test_reprs_tell_what_one_wants_to_know(model: Model) -> None:
    a, b = new_input("f32", 4, 3, name="a"), new_input("f32", 4, name="b")
    graph = Graph(ops.mul(ops.add(a, b), b, name="y"))
    assert repr(graph) == "<Graph of 2 nodes: a f32[4, 3], b f32[4] -> y f32[4, 3]>"
    exe = graphrt.prepare(graph, "cpu")
    assert repr(exe).startswith(f"<Executable of {graph!r} in 2 steps on cpu, ")
    assert repr(exe).endswith(" of memory, 2 inputs yet to be written>")
    exe.write_all({"a": np.ones((3, 4)), "b": np.ones(4)})
    assert repr(exe).endswith(" of memory>")
    told = repr(model)
    for part in (
        "architecture llama",
        "2 layers of width 64",
        "million weights in",
        "up to 256",
        "329 tokens",
        "on cpu",
    ):
        assert part in told
    session = model.session(SessionOptions(n_ctx=32, type_k="f32"))
    session.eval(tokens(5))
    session.unread = [1]
    assert repr(session).startswith("<Session with 6 of 32 tokens, 1 of them unread; cache of f32 and f16, ")


def test_a_large_graph_names_a_few_inputs() -> None:
    inputs = [new_input("f32", 4, name=f"in{i}") for i in range(20)]
    graph = Graph(*(ops.sqr(t) for t in inputs))
    assert "in5 f32[4] and 14 more ->" in repr(graph) and len(repr(graph)) < 400


@pytest.mark.parametrize("n", [1, 3, MAX_LINES, 3 * MAX_LINES])
def test_a_graph_is_drawn_for_notebooks(n: int) -> None:
    """Each tensor has a line, each source an arc; of a large graph the middle is left out, and said so."""
    x = new_input("f32", 4, name="<a & b>")
    for i in range(n):
        x = ops.add(x, x, name=f"x{i}") if i % 2 else ops.sqr(x)
    picture = ET.fromstring(Graph(x)._repr_svg_())
    space = "{http://www.w3.org/2000/svg}"
    lines = [element.text or "" for element in picture.iter(f"{space}text")]
    assert lines[0] == "in  <a & b>  f32[4]" and any(line.startswith("out ") for line in lines)
    left_out = max(0, n + 1 - MAX_LINES)
    assert len(lines) == min(n + 1, MAX_LINES) + (1 if left_out else 0)
    assert not left_out or f"... {left_out} more tensors" in lines
    assert left_out or len(list(picture.iter(f"{space}path"))) == n + n // 2


def test_a_model_s_graph_is_drawn(model: Model) -> None:
    svg = model.session().executable(1, 1).graph._repr_svg_()
    assert ET.fromstring(svg).tag.endswith("svg") and len(svg) < 60_000


# ---- threads ----


def test_threads_with_models_and_sessions_of_their_own(path: Path, model: Model) -> None:
    """Two models, and several sessions of each; chats too, whose templates share a process."""
    other, wanted = graphrt.load(path, "cpu"), model.chat(HELLO, 6, sampling=GREEDY, ignore_eos=True)
    found: list[str] = []

    def work(mine: Model) -> None:
        for _ in range(3):
            found.append(mine.chat(HELLO, 6, sampling=GREEDY, ignore_eos=True))

    threads = [threading.Thread(target=work, args=(mine,)) for mine in (model, other, model, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == [wanted] * 12
