"""The grid measures each point once, however often it is started, and its report says what its file holds."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import grid, modes, network, step_time, tables

SMOKE = list(grid.GRID["smoke"].modes)


def result(model: str, rate: str, steps: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """What is measured of a model at a rate, from the seconds of each mode's steps; a second to communicate."""
    samples = {
        mode: [{"step": t, "forward": t / 2, "backward": t / 2, "cpu": 0.9 * t} for t in times]
        for mode, times in steps.items()
    }
    measured = [{"modes": samples, "comm": [(1.0, 0.5)] * len(next(iter(steps.values())))}] * 2
    found = {"model": model, "rate": rate, "parameters": 1, "bytes": 4, "load_before": (0.5, 1, 1)}
    return found | {"load_after": (2.5, 1, 1)} | tables.summarise(measured, nbytes=4)


class StandIn:
    """In place of the ranks: one mode fails at a rate, and after some points the run is killed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[list[str], dict[str, int]]] = []
        self.failing, self.fails_at, self.fails_from, self.killed_after = "", "none", 0, 99

        @contextmanager
        def opened_network(rates: Sequence[str], *, namespaces: bool) -> Iterator[tuple[network.Network, list[str]]]:
            yield network.Loopback(), list(rates)

        patch.setattr(grid, "opened_network", opened_network)
        patch.setattr(grid, "measure_model", self.measure_model)

    def measure_model(
        self, model: str, network: Any, scratch: Path, *, modes: list[str], rates: dict[str, int], options: Any
    ) -> Iterator[dict[str, Any]]:
        scratch.mkdir()
        assert not options.ideal, "the report does not show it"
        self.asked.append((modes, rates))
        for rate in rates:
            if self.failing in modes and rate == self.fails_at and len(self.asked) > self.fails_from:
                raise step_time.BuildError(self.failing, "build: rank 0: Traceback\nRuntimeError: not here")
            if self.killed_after == 0:
                raise KeyboardInterrupt
            self.killed_after -= 1
            yield result(model, rate, {mode: [1.0] * 6 for mode in modes})


def start(file: Path, *options: str, rates: str = "none,2gbit,1gbit") -> int:
    return grid.run(grid.parse_arguments([str(file), "--models", "smoke", "--rates", rates, *options]))


def test_it_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, stand_in = tmp_path / "grid", StandIn(monkeypatch)
    stand_in.killed_after = 1
    with pytest.raises(KeyboardInterrupt):
        start(file)
    with file.open("a") as left:
        left.write('{"model": "smoke", "rate": "2g')
    assert list(grid.points(grid.read_lines(file))) == [("smoke", "none")]
    stand_in.killed_after = 99
    assert start(file) == 0
    assert [list(rates) for _, rates in stand_in.asked] == [["none", "2gbit", "1gbit"], ["2gbit", "1gbit"]]
    assert [line["rate"] for line in grid.read_lines(file)] == ["none", "2gbit", "1gbit"]
    first = file.read_text()
    assert start(file) == 0
    assert len(stand_in.asked) == 2 and file.read_text() == first
    with pytest.raises(SystemExit, match="name another file"):
        start(file, "--rounds", "3")
    capsys.readouterr()

    monkeypatch.setitem(grid.GRID, "smoke", grid.Row(("local", "ddp@7"), 6, 6))  # other modes: measured again
    assert start(file, rates="none,1gbit,200mbit") == 0
    assert stand_in.asked[2] == (["local", "ddp@7"], {"none": 6, "1gbit": 6, "200mbit": 3})
    shown = capsys.readouterr().out
    assert "| smoke, unshaped | 1000.0 | – | ddp@7 1000.0 |" in " ".join(shown.split())
    assert "load average before a point: 0.5 to 0.5\nload average after a point: 2.5 to 2.5\n" in shown


def test_a_mode_that_fails_is_left_out_once_and_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, stand_in = tmp_path / "grid", StandIn(monkeypatch)
    stand_in.failing = grid.REDUCER
    others = [mode for mode in SMOKE if mode != grid.REDUCER]
    assert start(file, rates="none") == 0
    assert "smoke without ddp_python_reducer@25, which failed: RuntimeError: not here" in capsys.readouterr().out
    assert start(file, rates="none,1gbit") == 0
    assert [asked for asked, _ in stand_in.asked] == [SMOKE, others, others]
    assert list(grid.points(grid.read_lines(file))) == [("smoke", "none"), ("smoke", "1gbit")]

    stand_in.failing, stand_in.fails_at = "fxddp_auto", "1gbit"  # as what is built again at every rate
    assert start(tmp_path / "later", rates="2gbit,1gbit,none") == 0
    left = [mode for mode in SMOKE if mode != "fxddp_auto"]
    rates = [(asked, list(rates)) for asked, rates in stand_in.asked[3:]]
    assert rates == [(SMOKE, ["2gbit", "1gbit", "none"]), (left, ["1gbit", "none"])]

    stand_in.failing, stand_in.fails_at = "local", "none"  # nothing to compare with
    assert start(tmp_path / "other", rates="none") == 1
    assert not (tmp_path / "other").exists()


def test_what_is_judged_is_measured_again_with_the_fastest_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"local": 1.0, "local_eager": 1.1, "ddp@25": 1.3, "ddp_static@25": 1.2, "fxddp@1": 1.3, "fxddp@25": 1.4}

    class Timed(StandIn):
        def measure_model(self, model: str, *arguments: Any, modes: list[str], **options: Any) -> Any:
            for found in super().measure_model(model, *arguments, modes=modes, **options):
                yield result(model, found["rate"], {mode: [seconds.get(mode, 2.0)] * 6 for mode in modes})

    file, stand_in = tmp_path / "grid", Timed(monkeypatch)
    monkeypatch.setattr(grid, "JUDGED", {("smoke", "none"): "this", ("smoke", "1gbit"): "that"})
    stand_in.killed_after = 4
    with pytest.raises(KeyboardInterrupt):
        start(file)
    fastest = ["local", "local_eager", "ddp@25", "ddp_static@25", "fxddp@1", "fxddp_auto"]
    assert stand_in.asked == [(SMOKE, {"none": 6, "2gbit": 6, "1gbit": 6}), (fastest, {"none": 9, "1gbit": 9})]
    stand_in.killed_after = 99
    assert start(file) == 0
    assert stand_in.asked[2:] == [(fastest, {"1gbit": 9})]
    assert list(grid.points(grid.read_lines(file), judged=True)) == [("smoke", "none"), ("smoke", "1gbit")]

    stand_in.failing, stand_in.fails_from = "ddp_static@25", len(stand_in.asked) + 1  # only among the fastest
    assert start(tmp_path / "other", rates="none") == 0
    others = [mode for mode in fastest if mode != "ddp_static@25"]
    assert stand_in.asked[3:] == [(SMOKE, {"none": 6}), (fastest, {"none": 9}), (others, {"none": 9})]
    stand_in.failing = ""
    del stand_in.asked[3:]

    seconds["ddp_uncut@1"] = 1.1  # measured anew at one of these rates, it is among the fastest
    left = [line for line in grid.read_lines(file) if line["judged"] or line["rate"] != "1gbit"]
    file.unlink()
    for line in left:
        grid.append(file, line)
    assert start(file) == 0
    assert [rates for _, rates in stand_in.asked[3:]] == [{"1gbit": 6}, {"none": 9, "1gbit": 9}]
    assert stand_in.asked[-1][0] == ["local", "local_eager", "ddp@25", "ddp_static@25", "ddp_uncut@1", *fastest[4:]]


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The best peer and the best size by median, ratios within rounds, and the bars."""
    drift = [1.0, 2.0, 4.0, 1.0, 2.0, 4.0]  # the machine: no ratio notices

    def times(base: float, *, late: float = 1.0) -> list[float]:
        return [base * factor for factor in drift[:-1]] + [base * late * drift[-1]]

    steps = {
        "local": times(1),
        "local_eager": times(1),
        "ddp@5": times(2.1),
        "ddp_uncut@5": times(2),
        "ddp_compile@5": times(2.2),
    }
    steps |= {"fxddp@5": times(1.98), "fxddp@25": times(2.4), "fxddp_auto": times(1.99, late=1.2)}
    lines = [
        result("transformer", "1gbit", steps),  # "auto": the interval of six is their minimum and maximum
        result("transformer", "none", {mode: steps[mode][:5] for mode in steps}),  # too few to tell
        result("smoke", "none", {"local": times(1), "ddp@5": times(2), "fxddp@5": times(1)}),  # not judged
        result("mlp", "1gbit", {mode: steps[mode] for mode in steps if mode != "fxddp_auto"}),  # which failed
        result("gone", "none", steps),  # measured by another version
    ]
    file = tmp_path / "grid"
    for judged in (False, True):
        for line in lines if judged else reversed(lines):
            said: dict[str, Any] = {"conditions": {"torch": "2", "rounds": None}, "asked": list(steps)}
            said |= {"judged": judged, "load_after": [3.5 if judged else 2.5]}
            if not judged or line["model"] != "smoke":
                grid.append(file, line | said)
    assert grid.main([str(file), "--report"]) == 0
    shown = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines() if line.startswith("|")]
    every, judged_rows = rows[:6], rows[6:]
    assert every[0] == list(grid.COLUMNS) and judged_rows[0] == [*grid.COLUMNS, "judged"]
    names = ["transformer, unshaped", "transformer, 1gbit", "mlp, 1gbit"]
    assert [row[0] for row in every[2:]] == [*names, "smoke, unshaped"]
    assert [row[0] for row in judged_rows[2:]] == names
    assert every[3][1:6] == ["2000.0", "2000.0", "ddp_uncut@5 4000.0", "3980.0", "fxddp@5 3960.0"]
    assert every[3][6:9] == ["0.995 [0.995, 1.194]", "0.990 [0.990, 0.990]", "1.005 [1.005, 1.206]"]
    assert every[3][9:] == ["198%", "1.990", "90%"]
    assert every[5][2:] == ["–", "ddp@5 4000.0", "–", "fxddp@5 2000.0", "–", "0.500 [0.500, 0.500]", "–", "–", "–", "–"]
    assert [row[-1] for row in judged_rows[2:]] == ["missed / missed", "missed / passed", "– / passed"]
    assert '"auto": 0 of 3 judged points passed\nthe best size: 2 of 3 judged points passed\n' in shown
    assert "not judged yet: transformer, 2gbit; " in shown
    assert "load average after a point: 2.5 to 3.5\n" in shown


def test_every_mode_of_the_grid_is_one() -> None:
    for model, row in grid.GRID.items():
        assert len(set(row.modes)) == len(row.modes), model
        for mode in row.modes:
            modes.check_mode(mode)
    assert {model for model, _ in grid.JUDGED} <= set(grid.GRID)
    point = {"model": "many", "rate": "none", "modes": {mode: {"median_ms": 1.0} for mode in grid.MANY}}
    assert set(grid.contenders("many", [point])) < set(grid.MANY), "which has no auto"
    assert {rate for _, rate in grid.JUDGED} <= set(grid.RATES)
