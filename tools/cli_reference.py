"""docs/cli.md: every verb with its options, made from the parsers.

    python -m graphrt.tools.cli_reference docs/cli.md      # writes the file; without a name it is printed

A test holds the file equal to what this makes, so it is to be run after a change of a verb's options.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from graphrt import env
from graphrt.tools.cli import FORMS, VERBS, Parser, verb_parser
from graphrt.tools.common import markdown_lines, write_text

HEAD = """# Command line

<!-- Made by `python -m graphrt.tools.cli_reference docs/cli.md`: change the parsers, not this file. -->

`graphrt VERB [options]`. Options may stand before, between and behind what else a verb takes. `graphrt VERB --help`
prints what is said here. Exit codes: 0 fine, 1 the answer is no, 2 it could not be asked, 130 interrupted."""


def reference() -> str:
    """The file's text."""
    lines = [HEAD, "", *markdown_lines(["verb", "what it does"], [_entry(verb) for verb in VERBS]), ""]
    lines += ["## Options of every verb", "", *_shared(), ""]
    for verb in VERBS:
        lines += _section(verb, verb)
        for words, module in FORMS.items():
            if words[0] == verb:
                lines += _section(" ".join(words), module)
    return "\n".join(lines)


def _entry(verb: str) -> list[str]:
    return [f"[`{verb}`](#graphrt-{verb})", _cell(VERBS[verb])]


def _shared() -> Iterator[str]:
    """Those of environment variables, which every verb takes."""
    rows = [
        [f"`{flag}`", f"`{name}`", _cell(f"{said} (default: {default})")] for name, flag, said, default in env.table()
    ]
    yield from markdown_lines(["option", "or the variable", "meaning"], rows)


def _section(title: str, module_name: str) -> Iterator[str]:
    module = importlib.import_module(f"graphrt.tools.verbs.{module_name}")
    parser = verb_parser(title, module)
    yield f"## graphrt {title}"
    yield ""
    yield f"`{usage(parser)}`"
    yield ""
    yield _plain(inspect.cleandoc(module.__doc__ or ""))
    yield ""
    shared = {flag.partition(" ")[0] for _, flag, _, _ in env.table()}
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if not _left_out(a, shared)]
        if not actions:
            continue
        own = group.title not in ("positional arguments", "options", "optional arguments")
        if own:
            yield f"**{group.title}**"
            yield ""
        yield from markdown_lines(["option" if actions[0].option_strings else "argument", "meaning"], map_rows(actions))
        yield ""


def _left_out(action: argparse.Action, shared: set[str]) -> bool:
    hidden = action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction)
    return hidden or any(flag in shared for flag in action.option_strings)


def map_rows(actions: list[argparse.Action]) -> list[list[str]]:
    """A row for each option or argument: how it is written, and its help."""
    return [[_cell(_written(a)), _cell(_help(a))] for a in actions]


def usage(parser: Parser) -> str:
    """`graphrt trace [options] MODEL`; what may be left out in brackets."""
    words = [parser.prog, "[options]"]
    for action in parser._actions:
        value = _value(action)
        if not action.option_strings:
            words.append(f"[{value}]" if action.nargs in ("?", "*") else value)
        elif action.required:
            words.append(f"{action.option_strings[0]} {value}")
    return " ".join(words)


def _written(action: argparse.Action) -> str:
    """`-c N`, `--ctx-size N`."""
    value = _value(action) if action.nargs != 0 else ""
    names = action.option_strings or [""]
    return ", ".join(f"`{f'{name} {value}'.strip()}`" for name in names)


def _value(action: argparse.Action) -> str:
    if action.metavar is not None:
        name = action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar)
        return f"{name}..." if action.nargs in ("+", "*") else name
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper()


def _help(action: argparse.Action) -> str:
    return (action.help or "") % {"default": action.default, "prog": ""} if action.help else ""


def _cell(text: str) -> str:
    """Text that a cell of a Markdown table takes, on one line."""
    return _plain(" ".join(text.split()).replace("|", "\\|"))


def _plain(text: str) -> str:
    """Text in which, outside of backticks, < starts no tag and __ nothing bold."""
    parts = text.split("`")
    parts[::2] = [part.replace("<", "&lt;").replace("__", "\\_\\_") for part in parts[::2]]
    return "`".join(parts)


def main(argv: list[str]) -> int:
    """Writes the file that argv names, or prints it."""
    text = reference()
    if argv:
        write_text(Path(argv[0]), text)
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
