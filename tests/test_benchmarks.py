"""The benchmark measures what it says: its statistics, its tables, and one real run of a tiny configuration."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import ideal, modes, network, planner, step_time, tables
from tests.live.programs import run_benchmark

MODES = ["local", "ddp", "ddp_compile", "fxddp", "fxddp_unsplit", "fxddp@3"]


def test_tiny_run(tmp_path: Path) -> None:
    """Two ranks, every mode, gradients checked, a table with a row per mode, and the same in the JSON file."""
    report_file, shared_cache = tmp_path / "report.json", tmp_path / "shared"
    options = ["--models", "smoke", "--rates", "none,1gbit", "--no-namespaces", "--bucket-mb", "1", "--rounds", "2"]
    options += ["--modes", ",".join(MODES), "--markdown", "--json", str(report_file)]
    done = run_benchmark("step_time", *options, TORCHINDUCTOR_CACHE_DIR=str(shared_cache))
    assert done.returncode == 0, done.stderr
    assert not [path for path in shared_cache.rglob("*") if path.is_file()]  # compiled code is of this run alone
    assert "plain loopback instead of a shaped network" in done.stderr and "not measured: ['1gbit']" in done.stderr

    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(MODES)
    assert {line.count("|") for line in table} == {9}
    assert "### smoke, 3.0 MiB in 6 parameters, unshaped" in done.stdout
    assert "load before" in done.stdout and "load after" in done.stdout

    report = json.loads(report_file.read_text())
    assert report["network"] == "loopback" and report["rounds"] == 2 and report["bucket_mb"] == 1
    assert len(report["load_before"]) == len(report["load_after"]) == 3
    (result,) = report["results"]
    assert (result["model"], result["rate"], result["parameters"]) == ("smoke", "none", 6)
    assert result["limit_ms"] >= result["forward_ms"] + max(result["backward_ms"], result["comm_ms"])
    assert len(result["comm_samples_ms"]) == 2
    assert list(result["modes"]) == MODES
    for mode, row in result["modes"].items():
        assert len(row["samples_ms"]) == 2 and row["min_ms"] <= row["median_ms"]
        for other in ("local", "ddp_compile"):
            assert row[f"vs_{other}"]["low"] <= row[f"vs_{other}"]["median"] <= row[f"vs_{other}"]["high"]
        assert row["built"]["difference"] <= 1e-3
        assert (row["built"]["graphs"] > 0) == (mode != "ddp")
    assert result["modes"]["local"]["vs_local"]["median"] == 1
    assert result["modes"]["ddp_compile"]["built"]["aot_compiles"] > 1  # DDPOptimizer did cut: code of its own
    assert result["modes"]["fxddp"]["built"]["launches"] > 1
    assert result["modes"]["fxddp"]["built"]["pieces"] > 1
    assert result["modes"]["fxddp_unsplit"]["built"]["pieces"] == 1
    ideals = {mode: row["ideal_ms"] for mode, row in result["modes"].items() if "ideal_ms" in row}
    assert list(ideals) == ["fxddp", "fxddp@3"] and min(ideals.values()) > result["forward_ms"]
    usual, larger = (result["modes"][mode]["built"]["buckets"] for mode in ("fxddp", "fxddp@3"))
    assert max(usual) < 2 * 2**20 <= max(larger) and sum(usual) == sum(larger)


@pytest.mark.parametrize(("count", "low", "high"), [(1, 1, 1), (5, 1, 5), (6, 1, 6), (15, 4, 12), (20, 6, 15)])
def test_median_interval_is_the_table_of_order_statistics(count: int, low: int, high: int) -> None:
    """The ranks printed in statistical tables for a 95 % interval of the median; the extremes below six values."""
    interval = tables.median_interval([float(i) for i in range(count, 0, -1)])
    assert (interval.low, interval.high) == (low, high)
    assert interval.median == (1 + count) / 2
    assert (interval.coverage >= 0.95) == (count >= 6)


def test_summary_pairs_within_rounds_and_takes_the_slower_rank() -> None:
    """The machine slows down tenfold in the second round: no ratio notices."""

    def rank(local: list[float], ddp_compile: list[float], comm: list[float]) -> dict[str, Any]:
        def samples(times: list[float], share: float = 1.0) -> list[dict[str, float]]:
            return [{"step": t, "forward": t / 4, "backward": 3 * t / 4, "cpu": share * t} for t in times]

        alone = [(seconds, seconds / 2) for seconds in comm]
        return {"modes": {"local": samples(local), "ddp_compile": samples(ddp_compile, 0.5)}, "comm": alone}

    measured = [rank([4, 40, 4], [5, 50, 5], [2, 20, 2]), rank([3, 30, 3], [6, 60, 6], [1, 10, 1])]
    result = tables.summarise(measured, nbytes=1)
    row = result["modes"]["ddp_compile"]
    assert row["samples_ms"] == [6000, 60000, 6000]
    assert row["vs_local"]["low"] == row["vs_local"]["high"] == 1.5
    assert row["exposed"] == 1.0 and row["busy"] == 0.5
    assert (result["forward_ms"], result["backward_ms"], result["limit_ms"]) == (1000, 3000, 4000)
    assert (result["local_cpu_ms"], result["comm_cpu_ms"]) == (4000, 1000)

    measured[0]["ideal"] = {"ddp_compile": {"ready": [1, 2], "computed": 3, "sending": [1, 3]}}
    measured[1]["ideal"] = {"ddp_compile": {"ready": [0, 4], "computed": 5, "sending": [2, 1]}}
    assert tables.summarise(measured, nbytes=1)["modes"]["ddp_compile"]["ideal_ms"] == 1000 + 7000


def test_the_ideal_is_a_list_schedule_of_pieces_and_buckets() -> None:
    begin = 100.0
    events = [("piece", 0, 0.0), ("piece", 1, 0.0), ("launch", 0, 0.0), ("piece", 2, 0.0), ("launch", 1, 0.0)]
    sent = SimpleNamespace(events=[*events, ("piece", 3, 7.0), ("wait", 0, 7.5), ("wait", 1, 9.0)])
    assert ideal.packing_pieces(sent) == [1, 2]
    pieces = [("piece", number, begin + seconds) for number, seconds in enumerate((0.5, 1.0, 3.0, 4.0))]
    local = SimpleNamespace(begin=begin, events=pieces)
    assert ideal.packed_after(local, sent) == [3.0, 4.0, 4.5]
    sent.events = [("piece", 0, 3.0), ("launch", 0, 3.25)]
    assert ideal.packed_after(SimpleNamespace(begin=begin, events=pieces[:1]), sent) == [0.75, 0.75]
    assert ideal.list_schedule([3.0, 4.0], [0.5, 1.0], 6.0) == 6.0, "hidden"
    assert ideal.list_schedule([3.0, 4.0], [5.0, 1.0], 6.0) == 9.0, "one after the other"
    assert ideal.list_schedule([3.0, 5.0], [1.0, 2.0], 6.0) == 7.0, "the network waits for the second"


def test_wrong_gradients_are_not_measured() -> None:
    right = {"weight": torch.tensor([1.0, -2.0])}
    assert modes.check_gradients("some", right, right) == 0
    for wrong in (torch.tensor([1.0, -2.1]), torch.tensor([1.0, float("nan")])):
        with pytest.raises(modes.BenchmarkError, match="mode some: gradient of weight differs"):
            modes.check_gradients("some", {"weight": wrong}, right)


def test_modes_have_code_objects_of_their_own() -> None:
    first, second = (modes.fresh_models(tag).ResidualMLP for tag in ("ddp@5", "ddp@0.5"))
    assert first.forward.__code__ is not second.forward.__code__
    assert first.__module__ != second.__module__  # by which Dynamo finds them again


@pytest.mark.parametrize(
    ("mode", "bucket_mb", "cap"), [("ddp", 5, 5), ("ddp@0.5", 5, 0.5), ("ddp_static@25", 5, None), ("ddp", 25, None)]
)
def test_ddp_gets_its_default_by_not_asking(
    mode: str, bucket_mb: float, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first bucket of the default has 1 MiB, that of 25 MiB asked for has 25."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(modes, "DistributedDataParallel", lambda module, **arguments: asked.update(arguments))
    modes.build(mode, "smoke", rank=0, bucket_mb=bucket_mb)
    assert asked == {"bucket_cap_mb": cap, "gradient_as_bucket_view": True, "static_graph": "static" in mode}


@pytest.mark.parametrize(
    ("mode", "parts", "title"),
    [
        ("ddp", ("ddp", None), "DDP, eager"),
        ("ddp_uncut@25", ("ddp_uncut", 25), "torch.compile(DDP), forward not cut, 25 MiB"),
        ("fxddp@0.5", ("fxddp", 0.5), "fxddp, 0.5 MiB"),
    ],
)
def test_a_mode_may_have_a_bucket_size(mode: str, parts: tuple[str, float | None], title: str) -> None:
    modes.check_mode(mode)
    assert modes.split_size(mode) == parts
    assert modes.title(mode) == title


@pytest.mark.parametrize(("text", "bits"), [("none", None), ("1gbit", 1e9), ("2.5gbit", 2.5e9), ("500mbit", 5e8)])
def test_rates(text: str, bits: float | None) -> None:
    assert network.bits_per_second(text) == bits


@pytest.mark.parametrize("text", ["", "1", "1gb", "-1gbit", "fast"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="rate must be 'none' or a number"):
        network.bits_per_second(text)


def test_without_iproute2_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda tool: None)
    fallback, reason = network.open_network(namespaces=True)
    assert fallback.kind == "loopback"
    assert reason is not None and "install iproute2" in reason


def test_a_compressed_run(tmp_path: Path) -> None:
    """What travels is compressed in fxddp's modes and in DDP's, and gradients are still compared with exact ones."""
    options = ["--models", "smoke", "--rates", "none", "--no-namespaces", "--rounds", "1", "--modes", "local,ddp,fxddp"]
    done = run_benchmark("step_time", *options, "--comm-hook", "fp16", "--json", str(tmp_path / "r"))
    assert done.returncode == 0, done.stderr
    assert "compressed by fp16" in done.stdout
    report = json.loads((tmp_path / "r").read_text())
    assert report["comm_hook"] == "fp16"
    built = {mode: row["built"]["difference"] for mode, row in report["results"][0]["modes"].items()}
    assert built["local"] < 1e-4 < built["fxddp"] < 2e-3
    assert 1e-4 < built["ddp"] < 2e-3


def test_four_ranks(tmp_path: Path) -> None:
    """Modes that are not among the usual ones, with gradients that were compared: two ranks on each of two nodes."""
    asked = ["ddp_fp16", "fxddp_hook_fp16", "fxddp_hierarchical", "fxddp_optimizer", "ddp_uncut", "ddp_python_reducer"]
    options = ["--models", "smoke", "--rates", "none", "--no-namespaces", "--rounds", "1", "--bucket-mb", "1"]
    options += ["--ranks", "4", "--optimizer", "--modes", ",".join(asked), "--json", str(tmp_path / "r")]
    done = run_benchmark("step_time", *options, timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r").read_text())
    assert report["ranks"] == 4
    built = {mode: row["built"]["difference"] for mode, row in report["results"][0]["modes"].items()}
    assert list(built) == asked
    assert max(built[mode] for mode in asked if not mode.endswith("fp16")) < 1e-3
    assert 1e-5 < built["ddp_fp16"] < 2e-3
    assert 1e-5 < built["fxddp_hook_fp16"] < 2e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "3"], "--ranks must be a multiple of 2"),
        (["--modes", "fxddp,fxddp_optimizer@5"], "give --optimizer"),
        (["--modes", "fxddp@5,ddp@5,fxddp@5"], "expected different ones"),
        (["--modes", "fxddp@5,dpd@5"], "got mode 'dpd@5', expected one of local, ddp, "),
        (["--modes", "fxddp_auto@5"], "fxddp_auto has no bucket size to choose"),
        (["--modes", "ddp@"], "mode 'ddp@': expected a number of MiB > 0 after '@'"),
        (["--modes", "ddp@0"], "mode 'ddp@0': expected a number of MiB > 0 after '@'"),
        (["--modes", "ddp@5.0"], "got mode 'ddp@5.0', expected ddp@5: one name for each"),
        (["--modes", "ddp@inf"], "mode 'ddp@inf': expected a number of MiB > 0 after '@'"),
    ],
)
def test_what_makes_no_comparison_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        step_time.parse_arguments(arguments)
    assert message in capsys.readouterr().err


def test_the_planners_are_measured_side_by_side(tmp_path: Path) -> None:
    report = tmp_path / "planner.json"
    done = run_benchmark("planner", "--counts", "100,400", "--rounds", "2", "--json", str(report))
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in rows[2:]] == ["100", "400"]
    found = json.loads(report.read_text())["rows"]
    assert [(row["gradients"], row["planner"]) for row in found] == [
        (count, name) for count in (100, 400) for name in ("fixed", "auto")
    ]
    for row in found:
        plan = planner.planners(row["gradients"])[row["planner"]]()
        assert (row["buckets"], len(row["samples"])) == (len(plan.buckets), 2)
        assert len(plan.grads) == row["gradients"]


def test_growth_is_the_exponent_between_two_counts() -> None:
    rows = [planner.Row(count, "auto", 1, (seconds, 900.0)) for count, seconds in ((10, 1.0), (100, 100.0))]
    assert [planner.growth(rows, row) for row in rows] == [None, pytest.approx(2)]
