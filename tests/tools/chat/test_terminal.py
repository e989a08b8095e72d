"""`graphrt run` without a prompt on a pseudo-terminal: a chat as somebody at a keyboard has it."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest
from support import ROOT
from support.pseudo_terminal import PseudoTerminal
from support.tiny import CHAT, write_model

from graphrt.tools.chat import terminal

UP, ALT_ENTER, CTRL_C, CTRL_D = "\x1b[A", "\x1b\r", "\x03", "\x04"


def test_a_chat_on_a_terminal(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf", "llama", tokenizer="spm", chat=CHAT, context_length=20_000)
    # nobody answers the editor's question where the cursor is
    ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm"}
    env = {**os.environ, **ours, "XDG_CACHE_HOME": str(tmp_path), "LC_ALL": "C.UTF-8"}
    argv = [sys.executable, "-m", "graphrt", "run", str(model), "--temp", "0", "-c", "20000", "--exact"]
    with PseudoTerminal(argv, env) as chat:
        chat.expect("m.gguf: /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves")
        chat.expect_editor()
        chat.type("/set predict 5\r")
        chat.expect("predict  5")
        chat.expect_editor()
        chat.type("hello\r")
        chat.expect("(stopped after 5 tokens")
        chat.expect("of 20000")

        chat.expect_editor()
        chat.type("/set predict -1\r")
        chat.expect("predict  -1")
        chat.expect_editor()
        chat.type("the sea\r")
        # the editor gives the terminal back, the answer's display hides the cursor, then something is shown
        chat.expect_raw(r"\x1b\[\?2004l.*\x1b\[\?25l[^\x1b\r\n]")
        chat.type(CTRL_C)
        chat.expect("(stopped)")
        chat.expect(" of 20000")
        chat.expect_editor()
        chat.type("/undo\r")
        chat.expect("took back 'the sea'; 1 turn left")

        chat.expect_editor()
        chat.type("/set predict 1\r")
        chat.expect("predict  1")
        for typed in ('"""\ra b\rc"""\r', f"a b{ALT_ENTER}c\r", "a b\\\rc\r"):
            chat.expect_editor()
            chat.type(typed)
            chat.expect("(stopped after 1 token")
            chat.expect(" of 20000")
            chat.expect_editor()
            chat.type("/undo\r")
            chat.expect("took back 'a b\\nc'; 1 turn left")

        chat.expect_editor()
        chat.type(f"half a question{CTRL_C}")
        chat.expect("(Ctrl-D or /exit leaves)")
        chat.expect_editor()
        chat.type("/set seed\r/stats\r")  # typed ahead
        chat.expect("seed     -1")
        chat.expect("generated")
        chat.expect_editor()
        chat.type(f"{UP}{UP}\r")
        chat.expect("seed     -1")
        chat.expect_editor()
        chat.type(CTRL_D)
        assert chat.code() == 0
    history = tmp_path / "graphrt" / "chat" / "history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600 and "+a b\n+c\n" in history.read_text()


def test_the_history_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(terminal, "MAX_HISTORY", 1000)
    path = terminal.history_file()
    assert path is not None and path.read_bytes() == b""
    entries = [f"\n# 2026-01-01 00:00:00\n+question {i}\n" for i in range(60)]
    path.write_text("".join(entries))
    assert terminal.history_file() == path
    left = list(terminal._history(path).load_history_strings())
    assert left == [f"question {i}" for i in reversed(range(60 - len(left), 60))] and 10 <= len(left) < 20
    path.chmod(0o666)
    assert terminal.history_file() is None, "another user could have written it"
    assert list(terminal._history(None).load_history_strings()) == []
