"""Ctrl-C at any moment of the start: one line and exit code 130, also where a library swallows what is raised in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, TESTS
from support.tiny import write_model

from graphrt import __main__ as command
from graphrt import interrupts
from graphrt.tools import cli

HARNESS = TESTS / "support" / "interrupted.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("interrupts") / "m.gguf", "llama", tokenizer="spm")


def python(*argv: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)])}
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, env=env, timeout=300)


def interrupted(at: int, model: Path) -> subprocess.CompletedProcess[str]:
    return python(str(HARNESS), str(at), "run", str(model), "-p", "the sea", "--raw", "-n", "1")


def test_ctrl_c_at_any_import_is_one_line(model: Path) -> None:
    whole = interrupted(0, model)
    n = int(whole.stderr.split()[-2])
    assert whole.returncode == 0 and n > 500
    for at in (1, 40, n // 2, n - 1):
        done = interrupted(at, model)
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "graphrt run: interrupted\n"), f"import {at}"


def test_what_swallows_an_interrupt_while_it_is_imported_does_not_go_on(tmp_path: Path) -> None:
    (tmp_path / "swallows.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
    )
    code = (
        f"import sys; sys.path.append({str(tmp_path)!r}); sys.argv[1:] = ['run', 'x']\n"
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from graphrt import interrupts; interrupts.install()\n"
        "import swallows; print('it went on')"
    )
    done = python("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "graphrt run: interrupted\n")


def test_an_ignored_signal_stays_ignored_and_the_end_of_the_work_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []
    monkeypatch.setattr(cli, "main", lambda argv: seen.append(signal.getsignal(signal.SIGINT)) or 0)
    try:
        for start in (signal.SIG_IGN, signal.default_int_handler):
            signal.signal(signal.SIGINT, start)
            assert command.main() == 0
            seen.append(signal.getsignal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIG_IGN, signal.SIG_IGN, interrupts._interrupted, signal.SIG_DFL]


@pytest.mark.parametrize("verb", ["run", "pull", "info", "perplexity", "tokenize"])
def test_help_comes_without_torch(verb: str) -> None:
    """Which takes seconds to load."""
    code = f"import sys; sys.argv[1:] = [{verb!r}, '--help']\nfrom graphrt.__main__ import main\nmain()"
    heavy = "\n".join(f"assert {name!r} not in sys.modules, {name!r}" for name in ("torch", "triton", "tokenizers"))
    done = python("-c", f"import sys\ntry:\n    exec({code!r})\nexcept SystemExit:\n    pass\n{heavy}")
    assert done.returncode == 0 and done.stdout.startswith(f"usage: graphrt {verb}"), done.stderr
