"""A chat on a terminal: prompt_toolkit reads messages of one or several lines, rich shows answers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import Completer, NestedCompleter, PathCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.text import Text

from graphrt import private_files
from graphrt.printing import terminal_text
from graphrt.tools.chat.commands import COMMANDS
from graphrt.tools.chat.conversation import Answer
from graphrt.tools.chat.markdown import MarkdownStream
from graphrt.tools.chat.settings import SWITCH, Settings
from graphrt.tools.chat.typed import unfinished

PROMPT, CONTINUED = "> ", ". "
#: Bytes of the file of what was typed: when it has more, the last half as many stay. One of more than MAX_READ, which
#: nobody has typed, is not read.
MAX_HISTORY, MAX_READ = 1 << 20, 1 << 28


class Terminal:
    """history: the file that keeps what was typed, None to keep nothing."""

    waits = True

    def __init__(self, history: Path | None) -> None:
        self._console = Console(markup=False, emoji=False, highlight=False)
        self._prompt: PromptSession[str] = PromptSession(
            PROMPT, history=_history(history), multiline=True, key_bindings=_keys(), completer=_completer(),
            complete_while_typing=False, prompt_continuation=lambda width, line, wrapped: CONTINUED,
        )  # fmt: skip

    def read(self) -> str:
        return self._prompt.prompt()

    def show(self, pieces: Iterator[str], markdown: bool) -> None:
        if markdown and self._console.is_terminal and not self._console.is_dumb_terminal:
            with MarkdownStream(self._console) as stream:
                for piece in pieces:
                    stream.push(piece)
            return
        for piece in pieces:
            self._console.out(terminal_text(piece), end="", highlight=False)
        self._console.print()

    def figures(self, answer: Answer, n_past: int, n_ctx: int) -> None:
        parts = [f"{answer.n_made} tokens, {answer.made_rate:.1f} tokens/s"]
        of = f"of {answer.n_prompt} tokens"
        if answer.n_readings > 1:  # then more was read than the conversation has
            of = f"tokens in {answer.n_readings} parts"
        parts.append(f"read {answer.n_read} {of}, {answer.read_rate:.1f} tokens/s")
        parts.append(f"context {n_past} of {n_ctx}")
        self._console.print(Text(" | ".join(parts), style="dim"), soft_wrap=True)

    def say(self, text: str) -> None:
        self._console.print(Text(terminal_text(text), style="dim", overflow="fold"))

    def warn(self, text: str) -> None:
        self._console.print(Text(terminal_text(text), style="red", overflow="fold"))


def history_file() -> Path | None:
    """Where what was typed is kept: a file of this user alone in the cache; None where there can't be one."""
    folder = private_files.cache_folder(None, "chat")
    if folder is None:
        return None
    path = folder / "history"
    with suppress(OSError):
        if path.exists():
            data = private_files.read(path, MAX_READ)
            if len(data) > MAX_HISTORY:
                _, _, kept = data[-MAX_HISTORY // 2 :].partition(b"\n\n")  # an entry begins with an empty line
                private_files.write(path, b"\n" + kept)
        else:
            private_files.write(path, b"")
        return path
    return None


def _history(path: Path | None) -> History:
    return InMemoryHistory() if path is None else FileHistory(os.fspath(path))


def _completer() -> Completer:
    """Commands, settings and files, on the tabulator."""
    switches = dict.fromkeys(SWITCH)
    names = {name: switches if isinstance(value, bool) else None for name, value in Settings().values().items()}
    arguments = {"set": names, "save": PathCompleter(), "load": PathCompleter()}
    return NestedCompleter.from_nested_dict({f"/{name}": arguments.get(name) for name in COMMANDS})


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        """Enter ends a message that is finished."""
        if unfinished(event.current_buffer.text):
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        """Alt-Enter makes a new line."""
        event.current_buffer.insert_text("\n")

    return keys
