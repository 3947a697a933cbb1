"""What a running training tells: times of buckets, ranges in a profile, the recorded step in a report."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fxddp
from fxddp import plan_log
from fxddp.stats import BackwardRecord, BucketRecord, Stats
from tests.live.lab import Mlp, buckets, compiled, expect, loss_of, seeded
from tests.live.pool import Pool

# ---- figures ---------------------------------------------------------------------------------------------------------


def record_of(*rows: tuple[int, float, float | None, float, float], end: float) -> BackwardRecord:
    """A synchronised backward that began at 0 with buckets (bytes, launched, arrived, waits, waited)."""
    return BackwardRecord(
        sync=True, launches=len(rows), buckets=[BucketRecord(*row) for row in rows], begin=0.0, end=end
    )


def test_means_are_over_backwards_with_the_same_buckets() -> None:
    old = record_of((999, 0, 1, 1, 1), end=2)
    one = record_of((100, 1, 3, 4, 0), (200, 2, 6, 5, 1), end=6)
    two = record_of((100, 1, 5, 4, 1), (200, 2, 7, 5, 2), end=7)
    found = Stats((old, one, two), 3)
    first, second = found.buckets
    assert (first.nbytes, first.seconds, first.waited, first.bandwidth) == (100, 3, 0.5, 100 / 3)
    assert (second.nbytes, second.seconds, second.waited, second.bandwidth) == (200, 4.5, 1.5, 200 / 4.5)
    assert found.waited == 2
    assert found.overlap == pytest.approx(1 - 4 / (5 + 6))


def test_what_was_not_seen_to_arrive_has_no_speed() -> None:
    found = Stats((record_of((100, 1, None, 4, 0), end=6),), 1)
    assert found.buckets[0].seconds is None
    assert found.buckets[0].bandwidth is None
    assert found.overlap is None
    assert "–" in str(found)
    assert Stats((), 0).buckets == ()
    assert Stats((), 0).waited == 0


def test_arrivals_are_noted_in_the_order_of_launches() -> None:
    done = [False, False]

    class Work:
        def __init__(self, number: int) -> None:
            self.number = number

        def is_completed(self) -> bool:
            return done[self.number]

    record = BackwardRecord(sync=True)
    for number in range(2):
        record.piece()
        record.launch(8, Work(number))
    done[0] = True
    assert record.buckets[0].arrived is None
    record.piece()
    assert record.buckets[0].arrived is not None and record.buckets[1].arrived is None
    record.wait(1)
    done[1] = True
    record.waited(1)
    assert record.buckets[1].arrived == pytest.approx(record.buckets[1].waits + record.buckets[1].waited)
    record.close()
    assert not record._travelling


class Curves:
    def __init__(self) -> None:
        self.points: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.points.append((name, value, step))


# ---- while training --------------------------------------------------------------------------------------------------


def ways(kind: str) -> dict[str, Any]:
    """What a bucket may go through on its way."""
    if kind == "powersgd":
        return {"comm_hook": fxddp.PowerSGD(1, start_iter=0, min_compression_rate=0.1)}
    if kind == "hook":
        return {"comm_hook": lambda state, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future()}
    return {"plain": {}, "ring": {"algorithm": "ring"}, "fp16": {"comm_hook": "fp16"}}[kind]


WAYS = ("plain", "ring", "fp16", "powersgd", "hook")


def steps(rank: int, world: int, kind: str) -> None:
    model, backend = compiled(seeded(0, Mlp), **ways(kind))
    for i in range(4):
        loss_of(model, i).backward()
    found = backend.stats()
    plan = backend.plans[0]
    expect([b.nbytes for b in found.buckets] == [b.nbytes for b in plan.buckets], f"{found}")
    for record in found.backwards:
        expect(len(record.buckets) == record.launches == buckets(backend) > 1, f"{record}")
        for bucket in record.buckets:
            expect(bucket.arrived is not None, f"{bucket} was not seen to arrive")
            assert bucket.arrived is not None
            times = [record.begin, bucket.launched, bucket.arrived, record.end]
            expect(times == sorted(times), f"{times}")
            expect(bucket.launched <= bucket.waits <= bucket.waits + bucket.waited <= record.end, f"{bucket}")
            expect(bucket.arrived <= bucket.waits + bucket.waited + 1e-4, f"{bucket}: arrived after the wait for it")
        launched = [when for kind, _, when in record.events if kind == "launch"]
        expect([bucket.launched for bucket in record.buckets] == launched, "launched at another time")
    expect(found.overlap is not None and 0 <= found.overlap <= 1, f"overlap {found.overlap}")
    expect(0 < found.waited < sum(record.end - record.begin for record in found.backwards), f"waited {found.waited}")
    expect(all(bucket.bandwidth and bucket.bandwidth > 0 for bucket in found.buckets), f"{found}")
    curves = Curves()
    found.write(curves, 7)
    names = [name for name, _, step in curves.points if step == 7]
    expect(len(set(names)) == len(names) == 3 + 3 * len(found.buckets), f"{names}")


@pytest.mark.parametrize("kind", WAYS)
def test_a_training_records_when_its_buckets_travel(pool: Pool, kind: str) -> None:
    pool.run(steps, kind)


def profiled(rank: int, world: int) -> dict[str, Any]:
    model, backend = compiled(seeded(0, Mlp))
    loss_of(model, 0).backward()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        loss_of(model, 1).backward()
    last = backend.stats().last
    loss_of(model, 2).backward()
    events = found.events() or []
    ranges = [event for event in events if event.name.startswith("fxddp.")]
    plan = backend.plans[0]
    for bucket in plan.buckets:
        (launch,) = [event for event in ranges if event.name == f"fxddp.bucket{bucket.index}.allreduce"]
        inside = [
            event
            for event in events
            if event.name == "c10d::allreduce_"
            and launch.time_range.start <= event.time_range.start <= launch.time_range.end
        ]
        expect(len(inside) == 1, f"bucket {bucket.index} has {len(inside)} collectives in its range")
        following = [event for event in ranges if event.name == f"fxddp.piece{bucket.index + 1}"]
        expect(len(following) == (bucket.index + 1 < last.pieces), f"{len(following)} pieces {bucket.index + 1}")
        expect(
            all(launch.time_range.end <= piece.time_range.start for piece in following),
            f"bucket {bucket.index} was launched after the piece that it was to overlap with had started",
        )
    return {"names": Counter(event.name for event in ranges), "buckets": len(plan.buckets)}


def test_a_profile_has_a_range_for_every_piece_launch_and_wait(pool: Pool) -> None:
    for found in pool.run(profiled):
        count = found["buckets"]
        wanted = [f"fxddp.{name}" for i in range(count) for name in (f"bucket{i}.allreduce", f"bucket{i}.wait")]
        names = {name: often for name, often in found["names"].items() if "piece" not in name}
        assert names == dict.fromkeys(wanted, 1)
        pieces = [name for name in found["names"] if re.fullmatch(r"fxddp\.piece\d+", name)]
        assert len(pieces) >= count


def profiled_steps(rank: int, world: int, kind: str) -> dict[str, list[str]]:
    """By bucket, the collectives whose innermost range is one of that bucket's."""
    model, backend = compiled(seeded(0, Mlp), **ways(kind))
    for i in range(2):
        loss_of(model, i).backward()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        loss_of(model, 2).backward()
    events = found.events() or []
    ranges = [event for event in events if re.match(r"fxddp\.bucket", event.name)]
    inside: dict[str, list[str]] = {}
    for event in events:
        if event.name.startswith("c10d::"):
            at = event.time_range.start
            around = [each for each in ranges if each.time_range.start <= at <= each.time_range.end]
            if around:  # the others are what ranks tell each other
                inner = max(around, key=lambda each: each.time_range.start)
                inside.setdefault(inner.name.split(".")[1], []).append(event.name)
    count = buckets(backend)
    launched = [event.name for event in ranges if event.name.endswith(".allreduce")]
    expect(sorted(launched) == sorted(f"fxddp.bucket{i}.allreduce" for i in range(count)), f"{launched}")
    expect(set(inside) == {f"bucket{i}" for i in range(count)} and count > 1, f"{inside} for {count} buckets")
    return inside


@pytest.mark.parametrize("kind", WAYS)
def test_every_step_of_a_bucket_is_in_a_range_of_that_bucket(pool: Pool, kind: str) -> None:
    for inside in pool.run(profiled_steps, kind):
        for started in inside.values():
            if kind == "ring":
                assert started == ["c10d::alltoall_base_", "c10d::_allgather_base_"]  # gloo's reduce-scatter is ours
            else:
                assert set(started) == {"c10d::allreduce_"}
                assert len(started) == (2 if kind == "powersgd" else 1)


def profiled_sparse(rank: int, world: int) -> None:
    module = seeded(0, lambda: nn.Sequential(nn.Embedding(16, 8, sparse=True), nn.Linear(8, 2)))
    model = fxddp.DistributedDataParallel(module, inner="aot_eager")
    model(torch.arange(4)).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        model(torch.arange(4)).sum().backward()
    names = Counter(event.name for event in found.events() or [])
    expect(names["fxddp.bucketoutside.allreduce"] == 1, f"{names}")
    expect(names["fxddp.bucketoutside.wait"] == 1, f"{names}")


def test_sparse_gradients_are_in_a_profile(pool: Pool) -> None:
    pool.run(profiled_sparse)


def reported(rank: int, world: int) -> str:
    model, backend = compiled(seeded(0, Mlp))
    for i in range(3):
        loss_of(model, i).backward()
    found = fxddp.explain(model)
    last = backend.stats().last
    expect(found.world_size == world, f"{found.world_size} ranks")
    sent = [span for span in found.recorded if span.kind == "bucket"]
    for span, bucket, record in zip(sent, found.buckets, last.buckets, strict=True):
        assert record.arrived is not None
        expect(abs(span.start + last.begin - record.launched) < 1e-9, "starts at another time")
        expect(bucket.measured == span.seconds, f"{bucket.measured} on the bucket, {span.seconds} in the timeline")
        expect(abs(span.seconds - (record.arrived - record.launched)) < 1e-9, f"{span} for {record}")
    pieces = [span for span in found.recorded if span.kind == "piece"]
    expect(len(pieces) == last.pieces and all(span.seconds >= 0 for span in pieces), f"{pieces}")
    expect("measured" in str(found), str(found))
    return found.to_json()


def test_a_report_on_a_training_has_what_it_recorded(pool: Pool, tmp_path) -> None:
    for text in pool.run(reported):
        found = fxddp.Explanation.from_dict(json.loads(text))
        found.save_trace(tmp_path / "trace.json")
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
            "fxddp: predicted",
            "fxddp: recorded",
        }
        assert [e["name"] for e in events if e["ph"] == "X" and e["cat"] == "wait" and e["pid"] == 1] == [
            f"fxddp.bucket{i}.wait" for i in range(len(found.buckets))
        ]


def recompiled(rank: int, world: int) -> None:
    model, backend = compiled(seeded(0, Mlp))
    for rows in (4, 5, 4):  # the second size is compiled again, for all sizes; the first keeps its graph
        model(torch.ones(rows, 8)).sum().backward()
        found, last = fxddp.explain(model), backend.stats().last
        expect([b.nbytes for b in found.buckets] == [b.nbytes for b in last.buckets], f"{rows}: {found}")
        expect(all(b.measured is not None for b in found.buckets), f"{rows} rows: nothing measured")
        expect([site.number for site in backend.sites].count(last.graphs[0]) == 1, f"{last.graphs}")
        left = len(backend.plans) - 1
        expect(any("left out" in note for note in found.notes) is (left > 0), f"{left}: {found.notes}")
    expect(len(backend.plans) == 2, f"{len(backend.plans)} graphs")


def test_a_report_after_a_recompile_tells_of_the_graph_that_runs(pool: Pool) -> None:
    pool.run(recompiled)


# ---- plans in the log ------------------------------------------------------------------------------------------------


class Switched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.one(x)
        return self.two(x) if both else x


def test_a_recompile_says_what_changed_and_why(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    model = torch.compile(Switched(), backend=fxddp.backend(inner="aot_eager"))
    x = torch.randn(2, 8)
    model(x, True)
    assert not [record for record in caplog.records if record.name == "fxddp.plan"]
    with caplog.at_level("INFO", logger="fxddp.plan"):
        model(torch.randn(3, 8), True)
        model(torch.randn(3, 8), False)
    first, second = [record.getMessage() for record in caplog.records if record.name == "fxddp.plan"]
    assert "compiled again, as 0/0: tensor 'x' size mismatch" in first
    assert "nothing in the buckets" in first
    assert "waits for one.weight" in first
    assert "test_stats.py" in first
    assert "compiled again, as" in second
    assert "both == True" in second
    assert "gradients: 576 B → 288 B" in second
    assert "went: two.bias, two.weight" in second


def test_the_switch_takes_names_it_knows() -> None:
    with pytest.raises(ValueError, match=r"FXDDP_LOGS=plan,graph: there is no graph; there is: plan"):
        plan_log.switch_on("plan,graph")


@pytest.mark.parametrize(
    ("variable", "value"), [("FXDDP_LOGS", "plan"), ("TORCH_LOGS", "fxddp"), ("TORCH_TRACE", "folder")]
)
def test_plans_are_told_where_they_are_asked_for(tmp_path, variable: str, value: str) -> None:
    script = (
        "import torch, fxddp\n"
        "m = torch.compile(torch.nn.Linear(4, 2), backend=fxddp.backend(inner='aot_eager'))\n"
        "m(torch.ones(2, 4)).sum().backward()\n"
    )
    folder = str(tmp_path / "trace")
    environment = {**os.environ, variable: folder if value == "folder" else value}
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, cwd=tmp_path, check=True
    )
    if value != "folder":
        assert "1 bucket, 40 B\n" in done.stderr
        return
    (trace,) = Path(folder).iterdir()
    text = trace.read_text()
    start = text.index('"name": "fxddp_plan"')
    payload = "\n".join(line.removeprefix("\t") for line in text[start:].splitlines()[1:] if line.startswith("\t"))
    told = json.JSONDecoder().raw_decode(payload)[0]
    assert told["graph"]["buckets"][0]["nbytes"] == 40
    assert told["recompile"] is None


# ---- reports on what was wrapped, or loaded from a cache -------------------------------------------------------------


def wrapped(rank: int, world: int) -> None:
    module = seeded(0, Mlp)
    model = fxddp.DistributedDataParallel(module, bucket_cap_mb=0.001, inner="aot_eager")
    x = torch.randn(6, 8)
    model(x).sum().backward()
    before = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    trained = fxddp.explain(model)
    expect(trained.model == "Mlp" and trained.world_size == world, f"{trained.model} on {trained.world_size}")
    planned = fxddp.explain(seeded(0, Mlp), x, inner="aot_eager")
    expect(planned.world_size == world, f"a model that was not wrapped is planned for {planned.world_size} ranks")
    expect(bool(trained.recorded), "the backward is not there")
    names = {name for name, _ in module.named_parameters()}
    expect({name for bucket in trained.buckets for name in bucket.names} == names, "other names")
    planned = fxddp.explain(model, x)
    expect([g.digest for g in planned.graphs] == [g.digest for g in trained.graphs], "another plan")
    expect(all(torch.equal(p.grad, before[n]) for n, p in module.named_parameters() if p.grad is not None), ".grad")


def test_a_wrapped_model_is_explained(pool: Pool) -> None:
    pool.run(wrapped)


CACHED = """
import torch, fxddp, json
from torch._dynamo.utils import counters
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.two(self.one(x))

model = torch.compile(Net(), backend=fxddp.backend())
model(torch.ones(2, 8)).sum().backward()
print(counters["aot_autograd"]["autograd_cache_hit"], fxddp.explain(model).to_json(code=True), sep="\\n")
"""


def test_a_report_is_whole_where_the_graphs_came_from_a_cache(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
    (tmp_path / "cached.py").write_text(CACHED)
    found = []
    for hits in (0, 1):
        done = subprocess.run(
            [sys.executable, "cached.py"], capture_output=True, text=True, env=environment, cwd=tmp_path, check=True
        )
        shown = done.stdout.splitlines()
        assert int(shown[0]) == hits
        found.append(fxddp.Explanation.from_dict(json.loads(shown[1])))
    assert found[0] == found[1]
    assert found[1].buckets[0].gradients[0].source is not None
    assert found[1].graphs[0].predicted > 0
