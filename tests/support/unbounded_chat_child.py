"""models/chat_child.py with all checks within Python taken out, so that only the limits of the system are left.

python -I -S unbounded_chat_child.py SETUP, as chat_process starts the other.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

CHECKS = ("weigh", "weigh_each", "expect", "check_product", "check_power", "check_output")
ARGUMENTS = ("check_arguments", "check_percent", "check_format")


def main() -> None:
    folder = json.loads(sys.argv[1])["packages"]["graphrt.models"][0]
    spec = importlib.util.spec_from_file_location("chat_child", Path(folder) / "chat_child.py")
    assert spec is not None and spec.loader is not None
    child = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(child)
    limit_process = child._limit_process

    def limit_process_alone(memory: int) -> None:
        limit_process(memory)
        from graphrt.models import chat_arguments, chat_environment, chat_limits, chat_renderer

        for module in (chat_limits, chat_arguments, chat_environment, chat_renderer):
            for name in (*CHECKS, *ARGUMENTS):
                if hasattr(module, name):
                    setattr(module, name, _nothing)
        chat_environment.MAX_NODES = 1 << 40
        chat_limits.Budget.tick = _nothing  # type: ignore[method-assign]
        chat_limits.Budget.make = _same  # type: ignore[method-assign]
        chat_limits.Budget.emit = _text  # type: ignore[method-assign]

    child._limit_process = limit_process_alone
    child.main()


def _nothing(*args: Any) -> int:
    return 0


def _same(budget: Any, value: Any, deep: bool = False) -> Any:
    return value


def _text(budget: Any, value: Any) -> str:
    return str(value)


if __name__ == "__main__":
    main()
