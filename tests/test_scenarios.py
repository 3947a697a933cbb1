"""Every scenario of `live.scenarios` against the yardstick, under stock DistributedDataParallel and under fxddp.

    pytest tests/test_scenarios.py -k "tied_weights and aot_eager-split"

"ddp" shows that the yardstick is right; "local" and "unequal" are broken on purpose: each scenario must notice.
"""

from __future__ import annotations

import pytest

from tests.live.pool import Pool, WorkerError
from tests.live.scenarios import FXDDP_KINDS, SCENARIOS, Backward, Outcome, Scenario, one_plan, run_scenario

TIMEOUT = 300.0  # inductor's first kernel of a test run compiles headers, too


def run(pool: Pool, name: str, kind: str) -> list[Outcome]:
    return pool.run(run_scenario, name, kind, timeout=TIMEOUT)


def report(outcomes: list[Outcome]) -> str:
    return "\n".join(f"rank {rank}: {line}" for rank, outcome in enumerate(outcomes) for line in outcome.differences)


def demand_nothing(found: str) -> None:
    if found:
        pytest.fail(found, pytrace=False)  # the lines say it all


def cases() -> list[object]:
    return [
        pytest.param(name, kind, id=f"{name}-{kind}")
        for name, scenario in SCENARIOS.items()
        for kind in FXDDP_KINDS
        if not {kind, kind.partition("-")[0]} & scenario.left_out.keys()
    ]


@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if not scenario.no_ddp])
def test_ddp(pool: Pool, name: str) -> None:
    demand_nothing(report(run(pool, name, "ddp")))


@pytest.mark.parametrize("name", SCENARIOS)
def test_missing_reduction_is_noticed(pool: Pool, name: str) -> None:
    assert report(run(pool, name, "local"))


@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if not scenario.same_weights])
def test_missing_broadcast_is_noticed(pool: Pool, name: str) -> None:
    assert report(run(pool, name, "unequal"))


@pytest.mark.parametrize(("name", "kind"), cases())
def test_fxddp(pool: Pool, name: str, kind: str) -> None:
    scenario = SCENARIOS[name]
    try:
        outcomes = run(pool, name, kind)
    except WorkerError as error:
        if scenario.refusal and {failure and failure.type for failure in error.errors} == {scenario.refusal}:
            return  # told on every rank, and by name: as good as a result
        raise
    found = report(outcomes)
    for rank, outcome in enumerate(outcomes):
        for line in stats_problems(scenario, kind, outcome):
            found += f"\nrank {rank}: {line}"
    demand_nothing(found)


def stats_problems(scenario: Scenario, kind: str, outcome: Outcome) -> list[str]:
    """Where the backend's own account does not show graphs that did the work, in words."""
    found = []
    for k, backward in enumerate(outcome.backwards):
        if not backward.sync and backward.launches:
            found.append(f"backward {k}: {backward.launches} launches without synchronisation")
    if not scenario.graphs_do_the_work:
        return found
    synchronised = [backward for backward in outcome.backwards if backward.sync]
    if len(synchronised) != outcome.synchronised:
        found.append(f"{len(synchronised)} synchronised backwards on record, expected {outcome.synchronised}")
    expected = scenario.launches(outcome.buckets)
    if max(expected, default=0) < 2:
        found.append(f"plans of {outcome.buckets} buckets, expected several in one")
    for k, backward in enumerate(synchronised):
        if backward.uncovered:
            found.append(f"synchronised backward {k}: no graph reduced {', '.join(backward.uncovered)}")
        if backward.launches not in expected:
            found.append(f"synchronised backward {k}: {backward.launches} launches, expected {sorted(expected)}")
        if (
            kind.endswith("-split")
            and not scenario.repacked
            and (scenario.launches is one_plan or expected == set(outcome.buckets))
        ):
            found += [f"synchronised backward {k}: {line}" for line in late_launches(backward)]
    return found


def late_launches(backward: Backward) -> list[str]:
    """Launches that come after the piece they were to overlap with has started: k after k + 1, in one graph."""
    pieces = sum(kind == "piece" for kind, _, _ in backward.events)
    found = [] if pieces >= backward.launches else [f"{pieces} pieces on record for {backward.launches} launches"]
    started = -1
    for kind, index, _ in backward.events:
        if kind == "piece":
            started = index
        elif kind == "launch" and started > index:
            found.append(f"launch {index} came after piece {started} had started")
    return found


@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "transformer",
        "convnet",
        "frozen_parameters",
        "parameter_in_an_eager_gap",
        "accumulation_under_no_sync",
        "two_models_with_one_backend",
    ],
)
def test_three_ranks(pool3: Pool, name: str) -> None:
    demand_nothing(report(run(pool3, name, "aot_eager-split")))
