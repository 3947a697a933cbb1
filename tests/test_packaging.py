"""What is built from the source folder, what it holds, and the two commands that README.md promises."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
import zipfile
from configparser import ConfigParser
from email.parser import BytesParser
from pathlib import Path

import pytest

import fxddp
from fxddp import check

ROOT = Path(__file__).resolve().parent.parent
VISIBLE = {
    "CHANGELOG.md",
    "LICENSE",
    "README.md",
    "benchmarks",
    "constraints.txt",
    "examples",
    "fxddp",
    "passes",
    "pyproject.toml",
    "tests",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that pip builds from the source folder, without network access."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*build, "-w", str(folder), str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def readme_block(name):
    """The fenced block right below the line `<!-- name -->` of README.md."""
    (block,) = re.findall(
        rf"^<!-- {name} -->\n```\w*\n(.*?)\n```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    return block


def test_passes_inside_the_package_is_a_link_to_the_top_level_folder():
    link = ROOT / "fxddp" / "passes"
    assert link.is_symlink()
    assert link.readlink() == Path("../passes")
    assert (link / "plan.py").samefile(ROOT / "passes" / "plan.py")


def test_the_wheel_holds_every_file_of_the_package_once(wheel):
    folders = {"fxddp": ROOT / "fxddp", "fxddp/passes": ROOT / "passes"}
    expected = {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in folders.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"fxddp/py.typed", "fxddp/passes/plan.py"} <= expected
    assert sorted(name for name in wheel.namelist() if ".dist-info/" not in name) == sorted(expected)


def test_the_wheel_has_the_version_of_the_code(wheel):
    (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = BytesParser().parsebytes(wheel.read(path))
    assert metadata["Version"] == fxddp.__version__
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel.namelist())


def test_dynamo_finds_the_backend_by_its_entry_point(wheel):
    (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    entries = ConfigParser()
    entries.read_string(wheel.read(path).decode())
    module, _, attribute = entries["torch_dynamo_backends"]["fxddp"].partition(":")
    assert callable(getattr(importlib.import_module(module), attribute))


def test_every_direct_dependency_is_pinned_to_one_version():
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["test"]
    assert {re.split(r"[<>=]", need)[0] for need in needed} <= {pin.split("==")[0] for pin in pins}


def test_the_passes_import_each_other_relatively_and_nothing_else_of_the_project():
    """Ruff bans `import passes` everywhere but in passes/ itself, where it cannot tell it from a relative import."""
    for path in (ROOT / "passes").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            absolute: list[str] = []
            if isinstance(node, ast.Import):
                absolute = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                absolute = [node.module or ""]
            wrong = {name.split(".")[0] for name in absolute} & {"passes", "fxddp"}
            assert not wrong, f"{path}: {ast.unparse(node)}"


def test_the_top_level_holds_only_what_belongs_there():
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    # Without git (an archive of the source folder) everything that lies there counts.
    files = listed.stdout.split("\0") if listed.returncode == 0 else [path.name for path in ROOT.iterdir()]
    visible = {name.split("/")[0] for name in files if name and not name.startswith(".")}
    assert visible <= VISIBLE


@pytest.mark.parametrize("name", ["main job", "tests"])
def test_the_readme_gives_one_command_with_its_own_installation(name):
    command = readme_block(name)
    assert len(command.splitlines()) == 1
    assert command.startswith("python -m pip install -c constraints.txt -e ")


def test_ci_runs_the_tests_command_of_the_readme_and_fails_with_it(tmp_path):
    ci = tmp_path / ".ci" / "run"
    ci.parent.mkdir()
    ci.write_text((ROOT / ".ci" / "run").read_text())
    marked = "<!-- main job -->\n```bash\necho wrong\n```\n\n<!-- tests -->\n```bash\n{}\n```\n"
    (tmp_path / "README.md").write_text(marked.format("touch ran && python -c 'import sys; sys.exit(7)'"))
    done = subprocess.run(["bash", str(ci)], capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    assert (tmp_path / "ran").exists()
    assert "wrong" not in done.stdout
    (tmp_path / "README.md").write_text("no commands\n")
    assert subprocess.run(["bash", str(ci)], capture_output=True, check=False).returncode == 1


def test_the_tests_command_runs_every_check():
    assert readme_block("tests").endswith('-e ".[test]" && python -m fxddp.check')
    assert [arguments[0] for arguments in check.commands().values()] == ["ruff", "ruff", "mypy", "pytest"]
    assert "tests" not in check.commands(fast=True)
    assert check.commands(pytest_args=["-k", "plan"])["tests"][-2:] == ("-k", "plan")  # the last word


def test_a_failing_check_does_not_keep_the_others_from_running(tmp_path, capfd):
    (tmp_path / "bad.py").write_text("import os\n")
    checks = {
        "one": ("ruff", "check", "--isolated", "--select=F"),
        "two": ("ruff", "check", "--isolated", "--select=W"),
    }
    assert check.run(checks, root=tmp_path) == ["one"]
    assert "two: passed" in capfd.readouterr().out
