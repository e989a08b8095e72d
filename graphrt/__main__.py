"""The command `graphrt`, also as `python -m graphrt`. It imports little before Ctrl-C is taken care of."""

import sys
from collections.abc import Sequence

from graphrt import interrupts, startup


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, this process's own unless another is given, and returns its exit code."""
    try:
        interrupts.install()
        if argv is None:
            startup.begin()
        from graphrt.tools.cli import main as run

        return run(argv)
    except KeyboardInterrupt:
        print(interrupts.line(interrupts.command_name(sys.argv[1:])), file=sys.stderr)
        return interrupts.EXIT_CODE
    finally:
        interrupts.finish()


if __name__ == "__main__":
    sys.exit(main())
