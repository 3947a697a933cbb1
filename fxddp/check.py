"""Runs every check of the project in one command, on a developer's machine and in CI alike.

    python -m fxddp.check             # ruff format, ruff check, mypy, pytest
    python -m fxddp.check --fast      # without pytest
    python -m fxddp.check -- -k plan  # what follows -- goes to pytest; -n 0 keeps it in one process

All of them run even if one fails; the summary at the end names those that did.
"""

import argparse
import importlib.metadata
import importlib.util
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PROCESSES = 2
"""Of pytest. The ranks of a test mostly wait for each other, so that two tests at a time suit two cores."""


def commands(*, fast: bool = False, pytest_args: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """The checks by name, each as arguments of `python -m`, in the order in which they run."""
    checks: dict[str, tuple[str, ...]] = {
        "format": ("ruff", "format", "--check"),
        "lint": ("ruff", "check"),
        "types": ("mypy",),
    }
    if not fast:
        checks["tests"] = ("pytest", "--numprocesses", str(PROCESSES), "--dist", "worksteal", *pytest_args)
    return checks


def run(checks: Mapping[str, Sequence[str]], *, root: Path = ROOT) -> list[str]:
    """Runs the checks in a folder, printing each; returns the names of those that failed."""
    failed = []
    for name, arguments in checks.items():
        print(f"$ python -m {shlex.join(arguments)}", flush=True)
        start = time.monotonic()
        code = subprocess.run([sys.executable, "-m", *arguments], cwd=root, check=False).returncode
        print(
            f"  {name}: {'passed' if code == 0 else f'failed (exit {code})'}, {time.monotonic() - start:.0f} s",
            flush=True,
        )
        if code:
            failed.append(name)
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the checks; the exit status is 0 if all passed, 1 if any failed, 2 if they could not run."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m fxddp.check",
        description="Run ruff format, ruff check, mypy and pytest.",
        epilog="-- ARGS: for pytest",
    )
    parser.add_argument("--fast", action="store_true", help="leave pytest out")
    checks = commands(fast=parser.parse_args(arguments[:split]).fast, pytest_args=arguments[split + 1 :])

    if not (ROOT / "pyproject.toml").is_file():
        print(f"found no pyproject.toml in {ROOT}: the checks need the project's source folder, not an installed copy")
        return 2
    tools = dict.fromkeys(arguments[0] for arguments in checks.values())
    needed = [*tools, *(["xdist"] if "pytest" in tools else [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        print(f'not installed: {", ".join(missing)}; run: python -m pip install -c constraints.txt -e ".[test]"')
        return 2
    versions = [f"{tool} {importlib.metadata.version(tool)}" for tool in ("torch", *tools)]
    print(f"python {platform.python_version()}, {', '.join(versions)}", flush=True)

    failed = run(checks)
    print(f"failed: {', '.join(failed)}" if failed else "all checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
