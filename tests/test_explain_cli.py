"""`python -m fxddp explain`: reports from the command line, and what goes wrong told in one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fxddp
from fxddp import units
from fxddp.__main__ import main

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 64), nn.Linear(64, 4)

    def forward(self, x):
        return self.two(torch.relu(self.one(x)))

def with_inputs():
    return Net(), (torch.zeros(2, 8),)

class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(8, 64)

    def forward(self, x, *, more):
        return self.one(x + more)

def with_names():
    return Sum(), {"x": torch.zeros(2, 8), "more": torch.zeros(8)}

def words():
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))

ready = Net()
number = 7

def picky():
    raise ValueError("no such size")

def broken():
    raise RuntimeError("no data here\\nsecond line")
"""
FAST = ["--inner", "aot_eager"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "little_models.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "little_models", raising=False)
    torch._dynamo.reset()
    return tmp_path


@pytest.mark.parametrize("target", ["little_models:Net", "little_models.py:Net", "little_models:ready"])
def test_it_prints_the_report(folder: Path, capsys: pytest.CaptureFixture, target: str) -> None:
    arguments = [target, "--input-shape", "2,8", "--world-size", "64", "--bandwidth", "100Gbit/s", "--latency", "5us"]
    assert main(["explain", *arguments, *FAST]) == 0
    shown = capsys.readouterr().out
    assert "Net on 64 ranks" in shown
    assert "100 Gbit/s and 5 µs a message" in shown
    assert "one.weight" in shown


def test_it_writes_page_trace_and_json(folder: Path, capsys: pytest.CaptureFixture) -> None:
    outputs = ["--html", "report.html", "--trace", "trace.json", "--json"]
    assert main(["explain", "little_models:with_inputs", "--world-size", "8", "--device", "cuda", *outputs, *FAST]) == 0
    found = fxddp.Explanation.from_dict(json.loads(capsys.readouterr().out))
    assert found.world_size == 8
    assert {bucket.device for bucket in found.buckets} == {"cuda"}
    page = fxddp.Explanation.load("report.html")
    assert page.buckets == found.buckets
    assert json.loads(Path("trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize("shape", ["2,8", "2x8", "2,8,"])
def test_it_shows_what_travels_and_waits_in_the_next_forward(
    folder: Path, capsys: pytest.CaptureFixture, shape: str
) -> None:
    options = ["--world-size", "8", "--comm-hook", "bf16", "--overlap", "next_forward", *FAST]
    assert main(["explain", "little_models:Net", "--input-shape", shape, *options, "--json"]) == 0
    Path("found.json").write_text(capsys.readouterr().out)
    found = fxddp.Explanation.load("found.json")
    assert found.settings["codec"] == "bf16"
    assert 2 * found.wire_bytes == found.nbytes == 4 * (8 * 64 + 64 + 64 * 4 + 4)
    assert any(bucket.needed is not None for bucket in found.buckets)


def test_inputs_may_be_integers(folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["explain", "little_models:words", "--input-shape", "4,3:int64", *FAST]) == 0
    assert "0.weight" in capsys.readouterr().out


def test_inputs_may_have_names(folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["explain", "little_models:with_names", *FAST]) == 0
    assert "one.weight" in capsys.readouterr().out


def test_two_bucket_sizes_are_compared(folder: Path, capsys: pytest.CaptureFixture) -> None:
    shared = ["--input-shape", "2,8", "--world-size", "64", "--first-bucket-mb", "0.0005", *FAST]
    assert main(["explain", "compare", "little_models:Net", "--bucket-mb", "0.001", "25", *shared]) == 0
    shown = capsys.readouterr().out
    assert "Net ×64, 25 MiB" in shown
    assert "bucket_mb: " in shown
    assert "faster" in shown or "slower" in shown


def test_two_saved_reports_are_compared(folder: Path, capsys: pytest.CaptureFixture) -> None:
    shared = ["little_models:Net", "--input-shape", "2,8", *FAST]
    assert main(["explain", *shared, "--world-size", "8", "--html", "a.html"]) == 0
    capsys.readouterr()
    assert main(["explain", *shared, "--world-size", "64", "--json"]) == 0
    Path("b.json").write_text(capsys.readouterr().out)
    assert main(["explain", "compare", "a.html", "b.json", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    before, after = fxddp.Explanation.load("a.html"), fxddp.Explanation.load("b.json")
    assert (rows["seconds"]["before"], rows["seconds"]["after"]) == (before.seconds, after.seconds)
    assert rows["nbytes"]["change"] == "same"
    assert main(["explain", "compare", "a.html", "b.json"]) == 0
    assert f"{units.duration(after.seconds - before.seconds)} a step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nothing:here", "--input-shape", "1"], 2, "there is no module 'nothing'"),
        (["nothing.py:here", "--input-shape", "1"], 2, "no such file"),
        (["little_models:nobody", "--input-shape", "1"], 2, "little_models has no 'nobody'"),
        (["little_models", "--input-shape", "1"], 2, "is not package.module:name"),
        (["little_models:number", "--input-shape", "1"], 2, "gave a int"),
        (["little_models:Net"], 2, "--input-shape is needed"),
        (["little_models:Net", "--input-shape", "2,a"], 2, "is not a shape"),
        (["little_models:Net", "--input-shape", "2,x"], 2, "is not a shape"),
        (["little_models:Net", "--input-shape", "2,,8"], 2, "is not a shape"),
        (["little_models:Net", "--input-shape", "2,8", "--algorithm", "tree"], 2, "algorithm must be"),
        (["little_models:Net", "--input-shape", "2,8", "--overlap", "backward"], 2, "overlap must be"),
        (["little_models:Net", "--input-shape", "2,8:int99"], 2, "is not a dtype"),
        (["little_models:Net", "--input-shape", "2,8", "--bandwidth", "fast"], 2, "--bandwidth: bandwidth must be"),
        (["little_models:Net", "--input-shape", "2,8", "--latency", "soon"], 2, "--latency: latency must be"),
        (["little_models:Net", "--input-shape", "2,8", "--device", "abacus"], 2, "is no device"),
        (["little_models:Net", "--input-shape", "2,8", "--bucket-mb", "-1"], 2, "bucket_mb must be a positive"),
        (["little_models:Net", "--input-shape", "2,8", "--inner", "gcc"], 2, "inner must be one of"),
        (
            ["little_models:Net", "--input-shape", "2,8", "--world-size", "0"],
            2,
            "world_size must be a whole number, at least 1",
        ),
        (["little_models:Net", "--input-shape", "2,8", "--html", "no/such/folder.html"], 2, "No such file"),
        (["little_models:Net", "--input-shape", "2,9"], 1, "RuntimeError: a and b must have same reduction dim"),
        (["little_models:broken", "--input-shape", "2,9"], 1, "no data here (--traceback"),
        (["little_models:picky", "--input-shape", "2,9"], 1, "ValueError: no such size (--traceback"),
        (["little_models:Net", "--input-shape", "2,8", "--flops", "-1"], 2, "--flops: flops must be a positive"),
        (["little_models:Net", "--input-shape", "2,8", "--bandwidth", "1e9"], 2, "--bandwidth: bandwidth must be like"),
        (["little_models:Net", "--input-shape", "2,8", "--measure", "--device", "cuda"], 2, "leave --device out"),
        (["compare", "a.html"], 2, "compare takes one model or two saved reports"),
        (["compare", "a.json", "b.json"], 2, "a.json: No such file"),
        (["compare", "little_models.json", "little_models.json"], 2, "is not a saved report"),
        (["compare", "bytes.json", "bytes.json"], 2, "bytes.json is not a saved report"),
        (["compare", "other.json", "other.json"], 2, "other.json: not a saved report"),
    ],
)
def test_an_error_is_one_line(folder: Path, capsys: pytest.CaptureFixture, arguments, code: int, message: str) -> None:
    Path("little_models.json").write_text("hello")
    Path("bytes.json").write_bytes(b"\xff\xfe{")
    Path("other.json").write_text("[]")
    assert main(["explain", *arguments, *([] if arguments[0] == "compare" or "--inner" in arguments else FAST)]) == code
    out, error = capsys.readouterr()
    assert out == ""
    assert message in error, error
    assert len(error.strip().splitlines()) == 1, error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: target"),
        (["little_models:Net", "--world-size", "two"], "argument --world-size: invalid int value: 'two'"),
        (["little_models:Net", "--bucket-mb", "x"], "'x' is neither a number nor auto"),
        (["little_models:Net", "--speed", "1"], "unrecognized arguments: --speed 1"),
        (["compare", "little_models:Net", "--bucket-mb", "1"], "argument --bucket-mb: expected 2 arguments"),
    ],
)
def test_an_argument_that_cannot_be_read_is_one_line(capsys: pytest.CaptureFixture, arguments, message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", *arguments])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1, error


def test_it_runs_as_a_module(folder: Path) -> None:
    paths = [str(Path(fxddp.__file__).parents[1]), str(folder)]  # the tests run from the source folder as well
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fxddp", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    done = run("explain", "--help")
    assert done.returncode == 0, done.stderr
    assert "--world-size" in done.stdout
    done = run("explain", "little_models:Net", "--input-shape", "2,9", *FAST)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
    for buffered in ({}, {"PYTHONUNBUFFERED": "1"}):  # it notices at its end, or at the first line
        reader, writer = os.pipe()
        os.close(reader)  # as `| head` does when it has seen enough
        command = [sys.executable, "-m", "fxddp", "explain", "little_models:Net", "--input-shape", "2,8", *FAST]
        cut = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False, env=environment | buffered)
        os.close(writer)
        assert not cut.stderr
    done = run("no")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert main(["--help"]) == 0
