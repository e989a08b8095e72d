"""How often Python looks for garbage while a command starts, and after."""

from __future__ import annotations

import subprocess
import sys

#: Prints whether it is as usual, and whether anything is left out for good, at each step.
SCRIPT = """
import gc, sys
usual = gc.get_threshold()
from graphrt import startup
from graphrt.__main__ import main
def say(): print(gc.get_threshold() == usual, gc.get_freeze_count() > 0)
startup.done(); say()
sys.argv = ["graphrt", "--version"]
main(["--version"]); say()
main(); say()
startup.done(); say()
startup.done(); say()
"""


def test_from_a_commands_start_until_its_model_is_there() -> None:
    """Not for a library, nor for a command line that is given to main()."""
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    said = [line for line in ran.stdout.splitlines() if not line.startswith("graphrt")]
    assert said == ["True False", "True False", "False False", "True True", "True True"]
