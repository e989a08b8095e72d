"""The commands of a chat, what is typed, settings, files, lines from a pipe, and the verb, without a terminal."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.talks import FakeScreen, talk
from support.tiny import CHAT, IM_END, IM_START, write_model

from graphrt.errors import GraphError, GraphrtError, SessionError
from graphrt.models import Model, SamplerParams, load
from graphrt.tools import cli
from graphrt.tools.chat import saved
from graphrt.tools.chat.commands import COMMANDS
from graphrt.tools.chat.conversation import Conversation
from graphrt.tools.chat.loop import converse
from graphrt.tools.chat.saved import Turn
from graphrt.tools.chat.screen import Plain
from graphrt.tools.chat.settings import Settings
from graphrt.tools.chat.typed import Typed, understood, unfinished


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("commands") / "spm.gguf", "llama", tokenizer="spm", chat=CHAT)


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return load(path, "cpu", exact=True)


def chat(conversation: Conversation, *typed: str) -> FakeScreen:
    screen = FakeScreen(list(typed))
    converse(conversation, screen)
    return screen


# ---- what is typed ----


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("hello", ("", "hello")),
        ("  hello  ", ("", "hello")),
        ("a\\\nb\\\nc", ("", "a\nb\nc")),
        ('"""\na\n\n  b\n"""', ("", "a\n\n  b")),
        ('"""one line"""', ("", "one line")),
        (' """a\\\n"""', ("", "a\\")),
        ("/undo", ("undo", "")),
        ("/set temp 0.5", ("set", "temp 0.5")),
        ("/save my chat.json ", ("save", "my chat.json")),
        ('/system """\nbe brief\nbe kind\n"""', ("system", "be brief\nbe kind")),
        ("/system a\\\nb", ("system", "a\nb")),
        (" /undo", ("", "/undo")),
        ('"""/undo"""', ("", "/undo")),
        ("/", ("?", "")),
        ("", ("", "")),
    ],
)
def test_what_is_typed(typed: str, wanted: tuple[str, str]) -> None:
    assert not unfinished(typed)
    assert understood(typed) == Typed(*wanted)


@pytest.mark.parametrize("typed", ["a\\", "a\nb\\", '"""', '"""a\nb', '"""a""', '/system """a', "/system a\\", '  """'])
def test_what_goes_on_with_another_line(typed: str) -> None:
    assert unfinished(typed)


# ---- commands ----


def test_help_names_all_commands(model: Model) -> None:
    for typed in ("/help", "/?", "/"):
        (text,) = chat(talk(model), typed).said
        assert all(f"/{name}" in text for name in COMMANDS) and "Ctrl-C" in text and '"""' in text


def test_clear_undo_and_regen(model: Model) -> None:
    conversation = talk(model, system="he sees")
    screen = chat(conversation, "hello", "/regen", "again", "/undo", "/undo", "/undo", "/regen")
    assert screen.answers[0] == screen.answers[1] != "", "greedy: the same again"
    assert len(screen.answers) == 4 and screen.answers[3] == ""
    assert [said for said in screen.said if "took back" in said] == [
        "took back 'again'; 1 turn left",
        "took back 'hello'; 0 turns left",
    ]
    assert screen.warned == [
        "there must be a turn to take back, there is none",
        "there must be a question to answer again, there is none yet",
    ]
    screen = chat(conversation, "hello", "again", "/clear", "hello")
    assert "forgot 2 turns" in screen.said and screen.answers[0] == screen.answers[2]
    assert conversation.system == "he sees" and [turn.question for turn in conversation.turns] == ["hello"]


def test_system(model: Model) -> None:
    conversation = talk(model)
    screen = chat(conversation, "/system", "/system he sees\\\nthe sea", "/system", "hello", "/system none", "/system")
    said = [text for text in screen.said if "stopped" not in text]
    assert said == [
        "no system message",
        "the system message is set",
        "he sees\nthe sea",
        "the system message is gone",
        "no system message",
    ]
    text = f"{IM_START}system\nhe sees\nthe sea{IM_END}\n"
    wanted = model.tokenizer.encode(text, add_bos=False, parse_special=True)
    assert conversation.session.tokens[1 : 1 + len(wanted)] == wanted


def test_set(model: Model) -> None:
    conversation = talk(model)
    screen = chat(
        conversation, "/set temp 0.5", "/set top-k=7", "/set markdown off", "/set predict -1", "/set seed", "/set",
        "/set tmp 1", "/set temp warm", "/set top_k 1.5", "/set markdown 1", "/set predict 0", "/set top_p 2",
        "/set nan", "/set temp nan",
    )  # fmt: skip
    assert conversation.settings == Settings(SamplerParams(temp=0.5, top_k=7), -1, False)
    assert screen.said[:5] == ["temp     0.5", "top_k    7", "markdown  off", "predict  -1", "seed     -1"]
    shown = dict(line.split(maxsplit=1) for line in screen.said[5].splitlines())
    assert shown["temp"] == "0.5" and shown["markdown"] == "off" and shown["min_p"] == "0.05" and len(shown) > 12
    for error, words in zip(
        screen.warned,
        ["did you mean temp", "temp must be a number, got 'warm'", "top_k must be a whole number", "must be on or off",
         "predict must be at least 1", "top_p must be from 0 to 1", "must be one of predict", "temp must be a finite"],
    ):  # fmt: skip
        assert words in error
    assert len(screen.warned) == 8


def test_set_of_several_values(model: Model, tmp_path: Path) -> None:
    conversation = talk(model)
    screen = chat(
        conversation, "/set logit_bias", "/set logit_bias 5+1.5 7-inf", "/set logit_bias 5", "/set logit-bias=4-2",
        "/set dry_sequence_breaker", r"/set dry_sequence_breaker = . \n a\x20b = \x00 é",
        f"/save {tmp_path / 'a.json'}",
    )  # fmt: skip
    said = [line.split(maxsplit=1)[1] for line in screen.said[:-1]]
    assert said == ["none", "5+1.5 7-inf", "4-2.0", r'\n : " *', r". \n a\x20b = \x00 é"]
    assert screen.warned == ["a bias must be as 15043+1, 15043-1.5 or 15043-inf, got '5'"]
    breakers = (".", "\n", "a b", "=", "\0", "é")
    assert conversation.settings.sampling == SamplerParams(0.0, logit_bias={4: -2.0}, dry_sequence_breaker=breakers)
    other = talk(model)
    chat(other, f"/load {tmp_path / 'a.json'}")
    assert other.settings == conversation.settings
    chat(other, "/set logit_bias none", "/set dry_sequence_breaker none")
    assert other.settings.sampling == SamplerParams(0.0, dry_sequence_breaker=())
    assert chat(other, r"/set dry_sequence_breaker \x6eone").said[0].split()[1] == r"\x6eone"
    assert list(other.settings.sampling.dry_sequence_breaker) == ["none"]


def test_a_bias_changes_the_answers(model: Model) -> None:
    conversation = talk(model, predict=1)
    chat(conversation, "hello")
    (made,) = conversation.session.unread
    chat(conversation, "/clear", f"/set logit_bias {made}-inf", "hello")
    assert conversation.session.unread != [made]
    screen = chat(conversation, "/set logit_bias 99999+1", "hello")
    assert "must name token ids, 0 to 328, got 99999" in screen.warned[0]


def test_stats(model: Model) -> None:
    conversation = talk(model)
    before = dict(line.split(maxsplit=1) for line in chat(conversation, "/stats").said[0].splitlines())
    assert before["turns"] == "0" and before["read"] == "0 tokens, no rate yet"
    screen = chat(conversation, "hello", "again", "/stats")
    shown = dict(line.split(maxsplit=1) for line in screen.said[-1].splitlines())
    session = conversation.session
    assert shown["model"] == "spm.gguf on cpu" and shown["turns"] == "2"
    assert shown["cache"].startswith(f"{session.n_past} of 160 tokens, ")
    n_read = sum(answer.n_read for answer in screen.shown)
    assert shown["read"].startswith(f"{n_read} tokens, ") and shown["read"].endswith(" tokens/s")
    assert shown["generated"].startswith("10 tokens, ")
    conversation.first = 1
    assert "of which the model no longer sees 1" in chat(conversation, "/stats").said[0]


def test_exit_and_what_is_no_command(model: Model) -> None:
    for leave in ("/exit", "/quit", "/bye"):
        assert chat(talk(model), leave, "/help").said == []
    screen = chat(talk(model), "/und", "/undo 3", "/etc/passwd", "/save", "/load")
    assert "did you mean /undo" in screen.warned[0] and "behind a space" in screen.warned[0]
    assert screen.warned[1] == "/undo takes no arguments, got '3'" and "got '/etc/passwd'" in screen.warned[2]
    assert screen.warned[3] == screen.warned[4] == "a file must be named, got none"
    assert chat(talk(model), "", "  ", '""""""').answers == [], "nothing asks nothing"


def test_what_ended_an_answer_is_said(model: Model) -> None:
    screen = chat(talk(model, predict=3), "hello")
    assert screen.said == ["(stopped after 3 tokens: /set predict -1 takes that limit away)"]
    screen = chat(talk(model, n_ctx=60, predict=-1), "hello", "again")
    full = "(stopped: the context of 60 tokens is full; -c gives a longer one, up to 256)"
    assert screen.said[0] == full and screen.said[2] == full
    assert screen.said[1].startswith("(the context of 60 tokens was full: the model no longer sees the oldest 1 turn; ")


# ---- files ----


def test_a_chat_is_saved_and_loaded(model: Model, tmp_path: Path) -> None:
    file = tmp_path / "my chat.json"
    conversation = talk(model, system="é\x1b[2J\n\u202e")
    screen = chat(conversation, 'hello "you"', "/set temp 0.25", f"/save {file}", "again", f"/save {file}")
    assert not screen.warned and f"wrote 2 turns to {file}" in screen.said
    value = json.loads(file.read_text())
    assert value["format"] == "graphrt chat" and value["model"] == "spm.gguf" and value["settings"]["temp"] == 0.25
    assert [m["role"] for m in value["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    other = talk(model)
    screen = chat(other, "lost", f"/load {file}")
    assert screen.said[-1] == f"read 2 turns from {file}"
    assert (other.system, other.turns) == (conversation.system, conversation.turns)
    assert other.settings == conversation.settings
    assert chat(other, "/set temp 0", "on").answers == chat(conversation, "/set temp 0", "on").answers
    file.write_text(file.read_text().replace("spm.gguf", "other.gguf"))
    assert chat(other, f"/load {file}").said[-1].endswith("; the answers in it are from other.gguf")


def test_another_file_is_not_replaced(model: Model, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    missing = tmp_path / "missing" / "chat.json"
    screen = chat(talk(model), f"/save {notes}", f"/save {missing}", f"/save {tmp_path}", f"/load {missing}")
    assert notes.read_text() == "mine" and [f.name for f in tmp_path.iterdir()] == ["notes.txt"]
    for error, words in zip(
        screen.warned, ["replaces only a file that is one", "no folder", "is a folder", "readable"]
    ):
        assert words in error
    assert len(screen.warned) == 4


def a_file(**changed: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    return {"format": "graphrt chat", "model": "m", "messages": messages, "settings": {"temp": 1.0}} | changed


def messages(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": "x"} for role in roles]}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "must be an object"),
        ({"format": "graphrt chat"}, "must have the field 'model'"),
        (a_file(extra=1), "must have no field 'extra'"),
        (a_file(format="other"), "format must be one of graphrt chat"),
        (a_file(model="\x1b[2J"), "model must be a text"),
        (a_file(model=1), "model must be a text"),
        (a_file(messages={}), "messages must be an array"),
        (a_file(messages=[1]), r"messages\[0\] must be an object"),
        (a_file(messages=[{"role": "user"}]), "must have the field 'content'"),
        (a_file(**messages("user")), "followed by the assistant's answer"),
        (a_file(**messages("assistant", "user")), r"messages\[0\].role must be one of user"),
        (a_file(**messages("user", "user")), r"messages\[1\].role must be one of assistant"),
        (a_file(**messages("user", "assistant", "system")), "must be one of user"),
        (a_file(messages=[{"role": "system", "content": 1}]), "must be a text of at most"),
        (a_file(messages=[{"role": "system", "content": "\ud800"}]), "whole characters"),
        (a_file(messages=[{"role": "system", "content": "x" * (saved.MAX_CONTENT + 1)}]), "at most"),
        (a_file(messages=[{"role": "user", "content": ""}] * (saved.MAX_MESSAGES + 2)), "at most"),
        (a_file(settings=[]), "settings must be an object"),
        (a_file(settings={"\x1b[2J": 1}), "must be one of predict"),
        (a_file(settings={"temp": "hot"}), "must be a number"),
        (a_file(settings={"temp": "nan"}), "finite"),
        (a_file(settings={"top_k": 1.5}), "whole number"),
        (a_file(settings={"markdown": 1}), "true or false"),
        (a_file(settings={"top_p": 7}), "top_p must be from 0 to 1"),
        (a_file(settings={"predict": 0}), "at least 1"),
    ],
)
def test_hostile_files(model: Model, tmp_path: Path, value: Any, words: str) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(value))
    conversation = talk(model, system="mine")
    conversation.turns, before = [Turn("q", "a")], conversation.settings
    with pytest.raises((GraphError, SessionError), match=words) as error:
        conversation.load(str(file))
    assert "\x1b" not in str(error.value)
    assert (conversation.system, conversation.turns) == ("mine", [Turn("q", "a")]), "nothing is taken of it"
    assert conversation.settings == before


def test_files_that_are_no_json(model: Model, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    for data in (b"", b"\xff", b"[" * 100_000, b'{"format": NaN}', b"1" * 5000):
        file.write_bytes(data)
        with pytest.raises(GraphrtError):
            talk(model).load(str(file))


def test_more_than_a_template_takes_is_loaded(model: Model, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    large = [{"role": role, "content": "x" * 3_000_000} for role in ["user", "assistant"] * 6]
    file.write_text(json.dumps(a_file(messages=large)))
    conversation = talk(model)
    conversation.load(str(file))
    assert "".join(conversation.ask("hello")) and conversation.first == 6


def test_a_long_conversation_is_loaded_and_only_its_end_is_seen(model: Model, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(a_file(**messages(*["user", "assistant"] * 5000))))
    conversation = talk(model)
    conversation.load(str(file))
    conversation.settings = Settings(SamplerParams(temp=0.0), 3)
    assert "".join(conversation.ask("hello"))
    assert len(conversation.turns) == 5001 and 4900 < conversation.first < 5000
    assert 60 < conversation.answers[-1].n_prompt < 160


# ---- a pipe, and the verb ----


def piped(conversation: Conversation, data: bytes) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    n_failed = converse(conversation, Plain(io.BytesIO(data), out, err))
    return n_failed, out.getvalue(), err.getvalue()


def test_lines_from_a_pipe(model: Model) -> None:
    answers = chat(talk(model), "hello", "the sea\nrain", "a\nb").answers
    n_failed, out, err = piped(talk(model), b'hello\r\n"""\nthe sea\nrain\n"""\na\\\nb')
    assert (n_failed, out) == (0, "".join(answer + "\n" for answer in answers)), "plain answers and nothing else"
    assert err.count("stopped after 5 tokens") == 3


def test_what_is_wrong_in_a_pipe(model: Model) -> None:
    n_failed, out, err = piped(talk(model), b"caf\xe9\n/nothing\nhello\n")
    assert n_failed == 2 and out.count("\n") >= 1
    assert "graphrt chat: a line must be UTF-8, got one that is not (byte 3)" in err
    assert "graphrt chat: a command must be one of" in err
    n_failed, _, err = piped(talk(model), b"x" * (1 << 24) + b"x\n")
    assert n_failed == 1 and "a line may have" in err
    assert piped(talk(model), b'"""unfinished')[0] == 0


class Standard(io.TextIOWrapper):
    """A standard stream; whether somebody sits there."""

    def __init__(self, data: bytes = b"", terminal: bool = False) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8", write_through=True)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    @property
    def text(self) -> str:
        raw = self.buffer
        assert isinstance(raw, io.BytesIO)
        return raw.getvalue().decode()


def verb(
    monkeypatch: pytest.MonkeyPatch, *argv: str, stdin: bytes = b"", out_is_terminal: bool = False
) -> tuple[int, str, str]:
    out, err = Standard(terminal=out_is_terminal), Standard()
    for name, stream in (("stdin", Standard(stdin)), ("stdout", out), ("stderr", err)):
        monkeypatch.setattr(sys, name, stream)
    try:
        code = cli.main(argv)
    except SystemExit as left:
        code = int(left.code or 0)
    return code, out.text, err.text


def test_the_verb(monkeypatch: pytest.MonkeyPatch, path: Path, model: Model, tmp_path: Path) -> None:
    argv = ("chat", str(path), "--temp", "0", "-n", "5", "--exact", "-ctk", "f32", "-ctv", "f32", "-c", "160")
    wanted = chat(talk(model, system="he sees"), "hello", "again").answers
    code, out, err = verb(monkeypatch, *argv, "-sys", "he sees", stdin=b"hello\n/nothing\nagain\n")
    assert (code, out) == (2, "".join(answer + "\n" for answer in wanted)) and "/nothing" in err
    file = tmp_path / "c.json"
    code, out, _ = verb(monkeypatch, *argv, "-sys", "he sees", stdin=f"hello\n/save {file}\n".encode())
    assert (code, out) == (0, wanted[0] + "\n")
    code, out, _ = verb(monkeypatch, *argv, "--load", str(file), stdin=b"again\n")
    assert (code, out) == (0, wanted[1] + "\n")


def test_a_model_without_a_template(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bare = str(write_model(tmp_path / "bare.gguf", "llama", tokenizer="spm"))
    said = iter([3 + byte for byte in b" rain\nUser: on"])
    with monkeypatch.context() as patch:
        patch.setattr(Model, "next_token", lambda *args: next(said))
        code, out, err = verb(patch, "chat", bare, stdin=b"hello\n")
    assert (code, out) == (0, " rain\n"), "it ends where the model writes the next question"
    assert "no chat template: it goes on with a transcript" in err
    template = tmp_path / "chat.jinja"
    template.write_text(CHAT)
    argv = ("chat", bare, "-n", "3", "--chat-template-file", str(template))
    assert verb(monkeypatch, *argv, stdin=b"hello\n")[0] == 0
    template.write_text("{% if %}")
    code, _, err = verb(monkeypatch, *argv, stdin=b"hello\n")
    assert code == 2 and "can't be compiled" in err
    code, _, err = verb(monkeypatch, *argv, "--load", "missing.json", stdin=b"hello\n")
    assert code == 2


@pytest.mark.parametrize("argv", [("chat",), ("run", "--raw", "-p", "hello")], ids=["chat", "run"])
def test_a_terminal_gets_no_control_characters(monkeypatch: pytest.MonkeyPatch, path: Path, argv: Any) -> None:
    """What a model writes could clear the screen, set its title or type."""

    def written(terminal: bool) -> str:
        ids = iter([3 + byte for byte in "a\x1b[2J\x07\u009b2K\u202e\rb\tz\n".encode()] + [2])
        monkeypatch.setattr(Model, "next_token", lambda *args: next(ids))
        more = [str(path)] if argv[0] == "chat" else [str(path), "-n", "60"]
        code, out, _ = verb(monkeypatch, argv[0], *more, *argv[1:], stdin=b"hello\n", out_is_terminal=terminal)
        assert code == 0
        return out

    assert written(True).startswith("a\\x1b[2J\\x07\\x9b2K\\u202e\\rb\tz\n")
    assert written(False).startswith("a\x1b[2J\x07\u009b2K\u202e\rb\tz\n"), "a pipe gets what the model wrote"
