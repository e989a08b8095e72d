"""docs/cli.md is what the parsers say."""

from __future__ import annotations

import importlib

from support import ROOT

from graphrt import env
from graphrt.tools.cli import FORMS, VERBS, verb_parser
from graphrt.tools.cli_reference import reference


def test_the_reference_is_what_the_parsers_say() -> None:
    found = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert found == reference(), "make it anew: python -m graphrt.tools.cli_reference docs/cli.md"


def test_it_has_every_verb_and_option_once() -> None:
    text = reference()
    sections = {s.partition("\n")[0]: s for s in text.split("\n## ")[1:]}
    modules = {verb: verb for verb in VERBS} | {" ".join(words): module for words, module in FORMS.items()}
    shared = {flag.partition(" ")[0] for _, flag, _, _ in env.table()}
    for title, name in modules.items():
        section = sections[f"graphrt {title}"]
        parser = verb_parser(title, importlib.import_module(f"graphrt.tools.verbs.{name}"))
        for action in parser._actions:
            for flag in action.option_strings:
                lines = [line for line in section.splitlines() if line.startswith("| ") and _names(line, flag)]
                assert len(lines) == (flag not in shared and flag not in ("-h", "--help")), (title, flag)
    for line in text.splitlines():
        assert line.count("`") % 2 == 0 and "%(" not in line and "==SUPPRESS==" not in line, line


def _names(line: str, flag: str) -> bool:
    return f"`{flag}`" in line.split(" | ")[0] or f"`{flag} " in line.split(" | ")[0]
