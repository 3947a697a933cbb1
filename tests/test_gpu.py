"""The GPU check: on a GPU its checks in quick form, anywhere its reading of traces and its refusal without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check

ROOT = Path(__file__).parents[1]
MODEL, OTHER = 7, 20  # streams
HOST, AUTOGRAD = 1, 2  # threads


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none")
@pytest.mark.parametrize("check", ["gradients", "ranks", "streams"])
def test_on_this_gpu(check: str, tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", "--quick", "--checks", check, "--json", str(report_file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=660,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    findings = json.loads(report_file.read_text())["findings"]
    assert any(finding["status"] == gpu_check.OK for finding in findings), done.stdout


def test_without_a_gpu_nothing_is_claimed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--quick", "--json", str(tmp_path / "report.json")]) == gpu_check.NO_GPU
    assert capsys.readouterr().out == "no GPU: nothing checked\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("checks", ["", "speed", "time,time", "gradients,speed"])
def test_unknown_checks_are_refused(checks: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.parse_arguments(["--checks", checks])
    assert "expected different ones out of gradients, ranks, streams, memory, time" in capsys.readouterr().err


class MadeUp:
    """A trace as `torch.profiler` writes it: the host drives a backward from 1000 to 2000 us in autograd's thread."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
            {"ph": "s", "id": 1, "pid": 0, "tid": HOST, "ts": 1001, "cat": "ac2g", "name": "ac2g"},
        ]
        self.host("user_annotation", gpu_check.BACKWARD, 1000, 1000, thread=HOST)
        # the profiler repeats an annotation on the device, around the kernels it launched
        self.event("gpu_user_annotation", gpu_check.BACKWARD, 1010, 3000, tid=MODEL, args={"stream": MODEL})
        self._correlation = 0

    def event(self, category: str, name: str, start: float, length: float, **more: Any) -> None:
        self.events.append({"ph": "X", "pid": 0, "cat": category, "name": name, "ts": start, "dur": length, **more})

    def host(self, category: str, name: str, start: float, length: float, *, thread: int = AUTOGRAD) -> None:
        self.event(category, name, start, length, tid=thread)

    def kernel(
        self, name: str, launched: float, start: float, length: float, *, stream: int = MODEL, kind: str = "kernel"
    ) -> None:
        """A kernel and the call that launches it."""
        self._correlation += 1
        number = {"correlation": self._correlation}
        driver = name.startswith("triton")
        self.event(
            "cuda_driver" if driver else "cuda_runtime",
            "cuLaunchKernel" if driver else "cudaLaunchKernel",
            launched,
            2,
            tid=AUTOGRAD,
            args=number,
        )
        self.event(kind, name, start, length, tid=stream, args={"stream": stream, "device": 0, **number})

    def reduction(
        self, called: float, start: float, length: float, *, stream: int = OTHER, name: str = "ncclDevKernel_AllReduce"
    ) -> None:
        """An all-reduce and the kernel it launches."""
        self.host("cpu_op", "c10d::allreduce_", called, 30)
        self.kernel(name, called + 20, start, length, stream=stream)

    def usual(self, **reduction: Any) -> MadeUp:
        """Three pieces and two all-reduces; the device lags behind the host. 150 of 250 us of the latter are hidden."""
        self.kernel("triton_forward", 900, 950, 100)  # launched before the backward: not its kernel
        self.kernel("triton_a", 1020, 1100, 200)
        self.reduction(1050, 1300, 150, **reduction)  # beside triton_b, all of it
        self.kernel("triton_b", 1100, 1300, 300)
        self.kernel("gemm_c", 1120, 1600, 100)
        self.reduction(1150, 1700, 100, **reduction)  # beside nothing: triton_d begins when it ends
        self.kernel("triton_d", 1200, 1800, 400)  # runs on after the host has left the backward
        self.kernel("Memcpy DtoD", 1210, 2200, 10, kind="gpu_memcpy")  # the model's, but no kernel
        self.kernel("optimizer", 2100, 2300, 10)  # launched after the backward
        return self


def test_overlap_is_found() -> None:
    trace = gpu_check.analyse(MadeUp().usual().events)
    assert trace == gpu_check.Trace(
        reductions=2,
        between=(1, 2, 1),
        compute_streams=frozenset({MODEL}),
        communication_streams=frozenset({OTHER}),
        communication=2,
        communication_us=250,
        hidden_us=150,
        syncs=(),
    )
    assert gpu_check.order_problems(trace, launches=2) == []
    assert gpu_check.stream_problems(trace) == []


def test_a_kernel_belongs_to_the_all_reduce_that_launched_it_whatever_its_name() -> None:
    trace = gpu_check.analyse(MadeUp().usual(name="some_kernel").events)
    assert (trace.communication, sorted(trace.communication_streams)) == (2, [OTHER])
    assert trace.between == (1, 2, 1)


def test_a_launch_from_a_thread_of_nccl_is_known_by_name() -> None:
    made_up = MadeUp().usual()
    made_up.kernel("void (anonymous namespace)::oneRankReduce<PreMulSum>", 1300, 2210, 10, stream=OTHER)
    assert gpu_check.analyse(made_up.events).communication == 3


def test_all_reduces_on_the_models_stream_are_found() -> None:
    trace = gpu_check.analyse(MadeUp().usual(stream=MODEL).events)
    assert gpu_check.stream_problems(trace) == [
        "all-reduces ran on stream [7], where the model computes: nothing can overlap"
    ]


def test_nothing_hidden_behind_nothing() -> None:
    """All-reduces that start when the model is done: another stream alone is no overlap."""
    made_up = MadeUp()
    made_up.kernel("triton_a", 1020, 1100, 100)
    made_up.reduction(1050, 1200, 50)
    made_up.kernel("triton_b", 1100, 1250, 100)
    made_up.reduction(1150, 1350, 50)
    trace = gpu_check.analyse(made_up.events)
    assert (trace.communication_us, trace.hidden_us) == (100, 0)


def test_all_reduces_after_all_kernels_are_found() -> None:
    made_up = MadeUp()
    made_up.kernel("triton_a", 1020, 1100, 100)
    made_up.kernel("triton_b", 1030, 1200, 100)
    made_up.reduction(1050, 1300, 50)
    made_up.reduction(1100, 1350, 50)
    trace = gpu_check.analyse(made_up.events)
    assert trace.between == (2, 0, 0)
    (problem,) = gpu_check.order_problems(trace, launches=2)
    assert "no kernel of the model was launched before all-reduce 1" in problem


def test_what_fxddp_says_it_launched_must_be_in_the_trace() -> None:
    trace = gpu_check.analyse(MadeUp().usual().events)
    assert gpu_check.order_problems(trace, launches=3) == ["the trace shows 2 all-reduces, fxddp recorded 3"]


@pytest.mark.parametrize("name", sorted(gpu_check.HOST_SYNCS))
@pytest.mark.parametrize("thread", [HOST, AUTOGRAD])
def test_a_wait_of_the_host_is_found(name: str, thread: int) -> None:
    made_up = MadeUp().usual()
    made_up.host("cpu_op", "aten::item", 1300, 60, thread=thread)
    made_up.host("cpu_op", "aten::_local_scalar_dense", 1301, 58, thread=thread)
    made_up.host("cuda_runtime", name, 1310, 40, thread=thread)
    made_up.host("cuda_runtime", name, 2500, 40, thread=thread)  # after the backward: allowed
    made_up.host("cuda_runtime", "cudaStreamWaitEvent", 1400, 1, thread=thread)  # the device waits, not the host
    trace = gpu_check.analyse(made_up.events)
    wait = f"{name} 310 us into the backward for 40 us, inside aten::_local_scalar_dense"
    assert trace.syncs == (wait,)
    assert gpu_check.order_problems(trace, launches=2) == [f"the host waited for the device: {wait}"]


def test_a_trace_without_the_backward_is_refused() -> None:
    events = [event for event in MadeUp().usual().events if event.get("cat") != "user_annotation"]
    with pytest.raises(ValueError, match="holds 0 ranges named 'gpu_check backward', expected 1"):
        gpu_check.analyse(events)


def test_ranks_are_one_line_and_the_cause_wins_over_its_consequence() -> None:
    def finding(what: str, status: str, text: str) -> gpu_check.Finding:
        return gpu_check.Finding("ranks", what, status, text)

    cause = finding("a", gpu_check.FAILED, "AssertionError: weight is off by 5e-01")
    consequence = finding("a", gpu_check.FAILED, "RuntimeError: Connection closed by peer")
    fine = finding("b", gpu_check.OK, "equal")
    for order in ([cause, consequence, fine, fine], [fine, fine, consequence, cause]):
        assert sorted(map(str, gpu_check.merged(order))) == sorted(map(str, [cause, fine]))
