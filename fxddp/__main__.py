"""The commands: `python -m fxddp explain …`."""

import os
import sys
from collections.abc import Sequence

from .explain.cli import main as explain

USAGE = """usage: python -m fxddp explain [compare] …

  explain          show what data-parallel training of a model sends, when, and what it costs
  explain compare  two bucket sizes, or two saved reports, side by side

python -m fxddp explain --help tells about the arguments; python -m fxddp.check runs the project's own checks."""


def main(argv: Sequence[str]) -> int:
    """Runs a command; returns its exit code."""
    if argv[:1] == ["explain"]:
        return explain(argv[1:])
    if argv[:1] in ([], ["-h"], ["--help"]):
        print(USAGE)
        return 0 if argv else 2
    print(f"python -m fxddp: error: {argv[0]!r} is no command; there is: explain", file=sys.stderr)
    return 2


if __name__ == "__main__":
    try:
        try:
            code = main(sys.argv[1:])
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever reads this, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)
