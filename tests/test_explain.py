"""`fxddp.explain`: what it says about a model, before and while it trains, without a process group."""

import gc
import inspect
import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxddp
from fxddp import units
from fxddp.explain import Size
from fxddp.explain.compare import compare
from fxddp.explain.diff import changes
from fxddp.explain.dry import DryBackend
from fxddp.explain.text import text
from fxddp.explain.timeline import AFTER, UNCOVERED, Steps, computed, length, simulate, waits
from fxddp.passes.cost import Network


class Odd(nn.Module):
    """Not compiled: a graph break in the middle of the model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 64)
        self.norm = nn.BatchNorm1d(64)
        self.odd = Odd(64)
        self.outer = nn.Linear(64, 4)
        self.fixed = nn.Linear(4, 4).requires_grad_(False)
        self.idle = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.inner(x))
        x = self.odd(x)
        return self.fixed(self.outer(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tokens(x))


def line(text: str) -> int:
    """Where this file says so first."""
    return next(i for i, found in enumerate(Path(__file__).read_text().splitlines(), 1) if text in found)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def explain(
    model: Any, world_size: int | None = None, *, x: Tensor | None = None, **arguments: Any
) -> fxddp.Explanation:
    arguments = {"bucket_mb": 0.001, "inner": "aot_eager", **arguments}
    return fxddp.explain(model, torch.randn(6, 8) if x is None else x, world_size=world_size, **arguments)


def test_every_parameter_is_accounted_for_once() -> None:
    model = Net()
    found = explain(model, world_size=64)
    packed = [name for bucket in found.buckets for name in bucket.names]
    names = [name for name, _ in model.named_parameters()]
    assert [parameter.name for parameter in found.parameters] == names
    assert sorted([*packed, *found.frozen, *found.uncovered]) == sorted(names)
    assert set(packed) == {f"{m}.{p}" for m in ("inner", "norm", "outer") for p in ("weight", "bias")}
    assert found.frozen == ("fixed.weight", "fixed.bias")
    states = {parameter.name: parameter.state for parameter in found.parameters}
    assert states["odd.linear.weight"] == "eager"
    assert states["idle.bias"] == "unused"
    assert found.nbytes == sum(p.nbytes for n, p in model.named_parameters() if n in packed)
    assert all(
        (p.graph, p.bucket) in {(b.graph, b.index) for b in found.buckets if p.name in b.names}
        for p in found.parameters
        if p.state == "bucket"
    )


def test_it_knows_the_line_of_the_model_behind_every_gradient() -> None:
    found = explain(Net())
    first, last = line("x = self.norm(self.inner(x))"), line("return self.fixed(self.outer(x))")
    for bucket in found.buckets:
        for gradient in bucket.gradients:
            assert gradient.source is not None
            assert gradient.source.file == __file__
            assert gradient.source.line == (last if gradient.name.startswith("outer") else first)
    assert "self.norm(self.inner(x))" in str(found)


def test_a_graph_break_comes_with_dynamos_reason_and_the_line() -> None:
    found = explain(Net())
    (broken,) = found.breaks
    assert "torch.compiler.disable" in broken.reason
    where = line("x = self.odd(x)")
    assert broken.source is not None
    assert (broken.source.file, broken.source.line) == (__file__, where)
    for parameter in found.parameters:
        if parameter.state == "eager":
            assert parameter.source == broken.source
            assert broken.reason in parameter.reason
    assert f"test_explain.py:{where}  x = self.odd(x)" in str(found)
    assert found.graphs[0].broken_by == broken
    assert found.graphs[1].broken_by is None


class Looped(nn.Module):
    """Dynamo compiles nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Odd(8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_break_before_any_graph_is_told_as_well() -> None:
    found = explain(Looped())
    assert found.graphs == ()
    (broken,) = found.breaks
    assert "torch.compiler.disable" in broken.reason
    assert broken.source is not None
    assert broken.source.line == line("x = layer(x)")
    assert {(parameter.state, parameter.source) for parameter in found.parameters} == {("eager", broken.source)}
    assert "x = layer(x)" in str(found)


def test_the_report_shows_the_numbers_of_the_plan() -> None:
    found = explain(Net(), world_size=64)
    shown = str(found)
    assert "64 ranks" in shown
    assert len(re.findall(r"^ +\d+ .*float32 +piece", shown, re.MULTILINE)) == len(found.buckets) == 3
    assert f"{2 * 63 * found.nbytes / 64 / 1024:.4g} KiB a step" in shown
    for name in ("inner.weight", "odd.linear.weight", "fixed.bias", "idle.weight"):
        assert name in shown
    assert units.duration(found.seconds) in shown


@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_report_fits_its_width(width: int) -> None:
    """Lines of code may be cut, figures and the number of parameters may not."""
    found = explain(Net(), world_size=8, bandwidth="1Gbit/s")
    shown = text(found, width)
    assert max(map(len, shown.splitlines())) <= width
    for each in found.sizes:
        assert f"{units.mib(each.bucket_mb)}: {units.duration(each.exposed)} ({each.buckets})" in shown
    for bucket in found.buckets:
        assert f"{', '.join(bucket.names)}" in shown or f", … ({len(bucket.names)} in all)" in shown
        assert f"  {bucket.names[0]}" in shown


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        names = [f"a_name_that_is_longer_than_most_lines_are_and_says_little_about_part_{i}" for i in range(3)]
        self.parts = nn.ModuleDict({name: nn.Linear(8, 8) for name in names})

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = part(x)
        return x


def test_a_long_name_is_cut_at_its_beginning() -> None:
    shown = text(explain(Deep(), world_size=2), 80)
    assert re.search(r"  …\S+part_2\.bias, … \(6 in all\)$", shown, re.MULTILINE)
    assert re.search(r"waits for …\S+part_\d\.weight  ◂ test_explain.py:\d+", shown)
    assert max(map(len, shown.splitlines())) <= 80


def significant(number: str) -> int:
    return len(number.replace(".", "").lstrip("0"))


@pytest.mark.parametrize("bucket_mb", [0.05, 0.1, 1 / 3, "auto"])
def test_figures_have_few_digits(bucket_mb: float | str) -> None:
    found = explain(Net(), world_size=7, bandwidth="123.456789Mbit/s", latency=1.23456e-5, bucket_mb=bucket_mb)
    backend = fxddp.backend(bucket_mb)
    for told in (str(found), repr(backend), compare(found, found)):
        assert not [number for number in re.findall(r"\d+\.\d+", told) if significant(number) > 4], told


def test_a_bucket_size_is_told_as_it_was_given() -> None:
    for given in (0.05, 0.1, 0.0005, 3, 1 / 3):
        found = explain(Net(), world_size=2, bucket_mb=given)
        assert found.settings["bucket_mb"] == pytest.approx(given, rel=1e-2 if given < 0.001 else 1e-5)
        assert [each.bucket_mb for each in found.sizes].count(found.settings["bucket_mb"]) == 1
        assert len({units.mib(each.bucket_mb) for each in found.sizes}) == len(found.sizes)
    assert explain(Net(), world_size=2, bucket_mb=0.05).settings["bucket_mb"] == 0.05
    assert "▸0.1: " in str(explain(Net(), world_size=2, bucket_mb=0.1))
    several = explain(Net(), world_size=2, bucket_mb_list=[0.001, 0.5])
    assert several.settings["bucket_cap_mb_list"] == [0.001, 0.5]
    assert "buckets of 0.001, 0.5 MiB, one after the other" in str(several)


def test_it_says_where_each_figure_comes_from() -> None:
    some = explain(Net(), world_size=2, bandwidth="2Gbit/s", flops=1e12)
    assert set(some.assumed) == {"latency", "memory_bandwidth"}
    assert "with 2 Gbit/s (given) and 10 µs a message (assumed);" in str(some)
    assert "1 TFLOP/s (given) and 20 GB/s of memory (assumed):" in " ".join(str(some).split())
    everything = explain(Net(), 2, bandwidth="2Gbit/s", latency="5us", flops=1e12, memory_bandwidth="30GB/s")
    assert everything.assumed == ()
    assert "with 2 Gbit/s and 5 µs a message; 1 TFLOP/s and 30 GB/s of memory:" in str(everything)
    measured = explain(Net(), world_size=2, measure=True)
    assert "computation as measured:" in str(measured)
    assert "TFLOP/s" not in str(measured)


def test_one_rank_sends_nothing() -> None:
    found = explain(Net(), world_size=1)
    assert found.sizes == ()
    assert "one rank sends nothing" in str(found)
    assert "each rank sends" not in str(found)
    assert "of exposed sending" not in str(found)


def test_one_of_a_thing_is_told_in_the_singular() -> None:
    found = fxddp.explain(nn.Linear(8, 8), torch.randn(6, 8), world_size=8, inner="aot_eager")
    assert "1 graph with a backward, 1 bucket," in str(found)
    said = "\n".join(found.advice)
    assert "1 all-reduce of 140 µs before the first byte" in said
    assert "larger buckets need fewer" not in said
    assert not re.search(r"\b1 (graphs|buckets|pieces|parameters|all-reduces)", str(found))
    assert "larger buckets need fewer" in "\n".join(explain(Net(), 64, bucket_mb=0.0001).advice)


def test_what_never_ran_is_told_so() -> None:
    for never in (fxddp.backend(), torch.compile(Net(), backend=fxddp.backend())):
        shown = str(fxddp.explain(never, world_size=4))
        assert "nothing with a backward was compiled so far" in shown
        assert "each rank sends" not in shown
    assert "compiled so far" not in str(explain(nn.Linear(8, 8).requires_grad_(False), 4))


def test_a_model_compiled_by_another_backend_has_its_own_names() -> None:
    found = explain(torch.compile(Net(), backend="eager"), world_size=4)
    assert found.model == "Net"
    assert "inner.weight" in {parameter.name for parameter in found.parameters}


def test_models_on_one_backend_are_all_accounted_for() -> None:
    backend = fxddp.backend(inner="aot_eager")
    first, second = nn.Linear(8, 4), nn.Linear(4, 2)
    one, two = torch.compile(first, backend=backend), torch.compile(second, backend=backend)
    two(one(torch.randn(6, 8))).sum().backward()
    found = fxddp.explain(one, world_size=2)
    shapes = sorted((parameter.name, parameter.shape) for parameter in found.parameters)
    assert shapes == sorted((n, tuple(p.shape)) for m in (first, second) for n, p in m.named_parameters())
    assert sorted(parameter.graph for parameter in found.parameters) == [0, 0, 1, 1]
    assert "this is all that the backend compiled, for Linear as well" in found.notes
    assert not any("several graphs" in note for note in found.notes)


class Twice(nn.Module):
    """Its two graphs use the same parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.odd = nn.Linear(8, 8), Odd(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.odd(self.linear(x)))


def test_what_several_graphs_send_is_told() -> None:
    notes = explain(Twice(), world_size=4).notes
    assert any("each of which sends a gradient: linear.bias, linear.weight" in note for note in notes)
    assert not any("several graphs" in note for note in explain(Net(), world_size=4).notes)


def test_auto_says_what_it_planned_for() -> None:
    alone = 'bucket_mb="auto" planned each of the 2 graphs alone'
    found = explain(Net(), world_size=64, bucket_mb="auto")
    assert any(alone in note for note in found.notes)
    assert not any("chose these buckets" in note for note in found.notes)
    assert json.loads(found.to_json())["settings"]["bucket_mb"] == "auto"
    assert found.settings["first_bucket_mb"] == "auto"
    sizes = [bucket.nbytes for bucket in found.buckets]
    assert f"buckets of {units.size(min(sizes))} to {units.size(max(sizes))}, chosen by bucket_mb" in str(found)
    assert not any("planned each" in note for note in explain(Net(), world_size=64).notes)
    assert not any("planned each" in note for note in explain(nn.Linear(8, 8), 64, bucket_mb="auto").notes)
    unknown = explain(Net(), bucket_mb="auto")
    assert 'bucket_mb="auto" chose these buckets for 1 rank, which sends nothing' in unknown.notes
    compiled = torch.compile(nn.Linear(8, 8), backend=fxddp.backend("auto", inner="aot_eager"))
    compiled(torch.randn(6, 8)).sum().backward()
    assert (
        'bucket_mb="auto" chose these buckets for 1 rank, which sends nothing'
        in fxddp.explain(compiled, world_size=8).notes
    )


def test_auto_plans_with_what_travels_between_that_many_ranks() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    hook: dict[str, Any] = {"comm_hook": fxddp.Int8(block=1024), "bandwidth": "200Mbit/s", "latency": 0}
    auto, fixed = (explain(model, 64, bucket_mb=mib, x=torch.randn(600, 64), **hook) for mib in ("auto", 25))
    assert auto.sizes[0].buckets == fixed.sizes[0].buckets == len(auto.buckets)
    assert auto.sizes[0].exposed == pytest.approx(fixed.sizes[0].exposed, rel=0.01)


@pytest.mark.parametrize(
    ("hook", "note"),
    [
        (fxddp.PowerSGD(2, start_iter=7), "the first 7 steps send gradients as they are; then PowerSGD sends a"),
        (fxddp.PowerSGD(2, start_iter=0), "PowerSGD sends a bucket in two all-reduces"),
        (fxddp.Adaptive(start_iter=3), "Adaptive is shown as it starts, uncompressed: from step 3 on"),
        (fxddp.Int8(), "what Int8 computes to encode and decode is not in the predicted step"),
    ],
)
def test_it_tells_what_is_not_predicted_of_a_codec(hook: Any, note: str) -> None:
    assert any(each.startswith(note) for each in explain(Net(), 8, comm_hook=hook).notes)
    assert not any("encode" in each for each in explain(Net(), 8, comm_hook="bf16").notes)


def test_a_long_report_is_cut_in_the_middle() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(60)))
    found = explain(model, bucket_mb=0.0001)
    assert len(found.buckets) > 50
    shown = str(found)
    assert shown.count("waits for") == 24
    assert f"({len(found.buckets) - 24} more)" in shown


@pytest.mark.parametrize(
    ("hook", "wire_bytes"),
    [
        (None, lambda shapes, world: sum(4 * math.prod(s) for s in shapes)),
        ("fp16", lambda shapes, world: sum(2 * math.prod(s) for s in shapes)),
        ("bf16", lambda shapes, world: sum(2 * math.prod(s) for s in shapes)),
        (
            fxddp.PowerSGD(2, min_compression_rate=0.5),
            lambda shapes, world: sum(4 * (2 * sum(s) if len(s) == 2 else math.prod(s)) for s in shapes),
        ),
        (
            fxddp.Int8(block=8),
            lambda shapes, world: world * math.ceil(sum(map(math.prod, shapes)) / (world * 8)) * (8 + 4),
        ),
        (fxddp.Adaptive(), lambda shapes, world: sum(4 * math.prod(s) for s in shapes)),
    ],
)
def test_it_shows_what_travels(hook: Any, wire_bytes: Callable[..., int]) -> None:
    found = fxddp.explain(Net(), torch.randn(6, 8), world_size=3, inner="aot_eager", comm_hook=hook)
    shapes = [[gradient.shape for gradient in bucket.gradients] for bucket in found.buckets]
    expected = sum(wire_bytes(bucket, 3) for bucket in shapes)
    assert found.wire_bytes == expected
    assert f"{2 * 2 * expected / 3 / 1024:.4g} KiB a step" in str(found)
    shown = " ".join(str(found).split())
    assert (f"compressed by {hook} to {expected / 1024:.4g} KiB" in shown) is (hook is not None)


def test_what_travels_is_what_takes_time() -> None:
    slow: dict[str, Any] = {"world_size": 64, "bandwidth": "1Mbit/s", "latency": 0}
    plain, half = explain(Net(), **slow), explain(Net(), comm_hook="bf16", **slow)
    for one, other in zip(plain.buckets, half.buckets, strict=True):
        assert (one.nbytes, one.wire_bytes) == (other.nbytes, 2 * other.wire_bytes)
        assert one.predicted and other.predicted
        assert one.predicted == pytest.approx(2 * other.predicted)
    late = [[span.seconds for span in found.timeline if span.kind == "uncovered"] for found in (plain, half)]
    assert late[0] == pytest.approx([2 * seconds for seconds in late[1]])
    for mib, other_mib in zip(plain.sizes, half.sizes, strict=True):
        assert mib.exposed == pytest.approx(2 * other_mib.exposed, rel=0.01)


def test_it_tells_the_steps_of_every_bucket() -> None:
    model = Net()
    found = explain(model, 64, algorithm="ring", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert {bucket.route for bucket in found.buckets} == {"reduce-scatter, all-gather, then SGD"}
    assert str(found).count("travels by reduce-scatter, all-gather, then SGD") == len(found.buckets)
    assert "algorithm=ring, parameters updated by SGD when their bucket has arrived" in str(found)
    assert (found.settings["algorithm"], found.settings["optimizer"]) == ("ring", "SGD")
    assert any("SGD" in note for note in found.notes)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert {bucket.route for bucket in explain(Net(), 64).buckets} == {"all-reduce"}
    assert "travels by" not in str(explain(Net(), 64))
    small = explain(Net(), 64, comm_hook=fxddp.Int8(block=8))
    routes = {bucket.route: bucket.wire_bytes < bucket.nbytes for bucket in small.buckets}
    assert routes == {"all-to-all, all-gather": True, "all-reduce": False}


def some_hook(state: object, bucket: Any) -> Any:
    raise NotImplementedError


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(1000, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x))


def test_it_tells_which_tables_travel_in_rows() -> None:
    x = torch.arange(20)
    rest = 4 * (4 * 8 + 4)
    for hook, row in ((None, 4 * 8), ("bf16", 2 * 8)):
        found = explain(Words(), 4, x=x, bucket_mb=1, comm_hook=hook)
        (bucket,) = found.buckets
        assert bucket.route == "all-reduce, all-gather of 20 of 1,000 rows of table.weight"
        assert bucket.wire_bytes == 4 * 20 * (8 + row) // 2 + (rest if hook is None else rest // 2)
        assert "and rows in place of tables" in " ".join(str(found).split())
    alone = explain(Words(), 4, x=x)
    assert [bucket.route for bucket in alone.buckets] == [
        "all-reduce",
        "all-gather of 20 of 1,000 rows of table.weight",
    ]
    others: list[dict[str, Any]] = [{}, {}, {"algorithm": "ring"}, {"comm_hook": some_hook}]
    for world_size, options in zip((1, 64, 4, 4), others, strict=True):
        whole = explain(Words(), world_size, x=x, **options)
        assert whole.wire_bytes == whole.nbytes
        assert "rows" not in str(whole)
    model = torch.compile(Words(), backend=fxddp.backend(inner="aot_eager"))
    model(x)
    assert fxddp.explain(model, world_size=4).wire_bytes < fxddp.explain(model, world_size=4).nbytes
    fxddp.backend_of(model).register_comm_hook(None, some_hook)
    assert fxddp.explain(model, world_size=4).wire_bytes == fxddp.explain(model, world_size=4).nbytes


def test_it_tells_what_was_registered_later() -> None:
    module = nn.Linear(8, 8)
    model = torch.compile(module, backend=fxddp.backend(inner="aot_eager"))
    backend = fxddp.backend_of(model)
    model(torch.randn(6, 8))
    backend.register_comm_hook(None, some_hook)
    backend.register_optimizer(torch.optim.Adam(module.parameters()))
    for found in (fxddp.explain(model, world_size=2), fxddp.explain(model, torch.randn(6, 8), world_size=2)):
        assert [bucket.route for bucket in found.buckets] == ["hook some_hook, then Adam"]
        assert "comm_hook=some_hook, parameters updated by Adam" in str(found)
        assert "each rank would send, without some_hook, " in str(found)
        assert any("some_hook" in note for note in found.notes)
    other = fxddp.explain(model, torch.randn(6, 8), world_size=2, comm_hook="fp16")
    assert [bucket.route for bucket in other.buckets] == ["all-reduce, then Adam"]


def test_it_holds_the_graphs_and_what_each_pass_did() -> None:
    graph = explain(Net()).graphs[0]
    for code in (graph.dynamo, graph.forward, graph.backward):
        assert "def forward(self" in code
    assert [entry.name for entry in graph.passes[:3]] == ["plan", "insert_allreduce", "schedule"]
    assert "all_reduce" not in graph.passes[0].code
    assert graph.passes[0].diff == ""
    assert graph.passes[1].code.count("_c10d_functional.all_reduce.default") == len(graph.buckets)
    added = [row for row in graph.passes[1].diff.splitlines() if row.startswith("+") and "all_reduce.default" in row]
    assert len(added) == len(graph.buckets)
    assert graph.passes[1].added == sum(row.startswith("+") for row in graph.passes[1].diff.splitlines()) > len(added)
    assert len(graph.pieces) >= len(graph.buckets)
    assert not any("all_reduce" in piece.code for piece in graph.pieces)
    assert {piece.bucket for piece in graph.pieces} >= {bucket.index for bucket in graph.buckets}
    for bucket in graph.buckets:
        assert graph.pieces[bucket.piece].bucket == bucket.index
        for gradient in bucket.gradients:
            assert gradient.node in graph.passes[0].code


def test_a_diff_gives_back_both_texts() -> None:
    before = "\n".join(f"line {i}" for i in range(50))
    after = before.replace("line 7\n", "line 7\nnew\n").replace("line 30\n", "").replace("line 44", "other")
    rows = changes(before, after).splitlines()
    assert [row for row in rows if row.startswith("+")] == ["+ new", "+ other"]
    assert [row for row in rows if row.startswith("-")] == ["- line 30", "- line 44"]
    assert changes(before, before) == ""
    assert "+ moved" in changes("moved\na\nb\nc", "a\nb\nc\nmoved")


def test_a_diff_of_long_texts_takes_no_time() -> None:
    rows = [f"%{i} = op({i - 1})" for i in range(60_000)]
    moved = rows[::3] + [row for i, row in enumerate(rows) if i % 3]
    assert changes("\n".join(rows), "\n".join(moved)).count("\n") > 20_000


def test_the_step_is_the_one_of_the_model() -> None:
    """Counted by hand: N=2, 1000 bytes a second, no latency: an all-reduce of n bytes takes n/1000 seconds."""
    network = Network(2, 1000, 0)
    spans = simulate([Steps((1,), ((2, (0,)), (1, (1,)), (3, ())), (5000, 1000))], network, [2000])
    sent = [(span.kind, span.index, span.start, span.end) for span in spans if span.lane == "network"]
    assert sent == [("bucket", 0, 3, 8), ("bucket", 1, 8, 9), ("uncovered", 0, 9, 11)]
    assert (computed(spans), length(spans)) == (7, 11)
    assert waits(spans) == {(0, 0): 1, (0, 1): 1, (UNCOVERED, 0): 2}
    assert [span.graph for span in simulate([Steps((1,), ((1, ()),))] * 2, None)] == [0, 1, 1, 0]


def test_the_next_forward_waits_for_what_it_reads() -> None:
    """Counted by hand, as above: bucket 1 of graph 0 is needed first and launched first, its bucket 0 never read."""
    network = Network(2, 1000, 0)
    first = Steps((1, 2, 1), ((2, ()), (1, (1, 2, 0))), (2000, 5000, 3000), {0: AFTER, 1: 0, 2: 2})
    second = Steps((4,), ((3, (0,)),), (1000,))  # another graph uses its bucket, too: the backward waits
    spans = simulate([first, second], network, [1000])
    told = [(span.kind, span.graph, span.index, span.start, span.end) for span in spans if span.lane == "network"]
    assert told == [
        ("bucket", 1, 0, 3, 4),
        ("bucket", 0, 1, 6, 11),
        ("bucket", 0, 2, 11, 14),
        ("bucket", 0, 0, 14, 16),
        ("uncovered", UNCOVERED, 0, 16, 17),
    ]
    told = [(span.kind, span.graph, span.index, span.start, span.end) for span in spans if span.lane == "compute"]
    assert told == [
        ("piece", 1, 0, 0, 3),
        ("piece", 0, 0, 3, 5),
        ("piece", 0, 1, 5, 6),
        ("wait", UNCOVERED, 0, 6, 17),
        ("forward", 0, 0, 17, 18),
        ("forward", 0, 1, 18, 20),
        ("forward", 0, 2, 20, 21),
        ("forward", 1, 0, 21, 25),
    ]
    spans = simulate([first, second], network)
    told = [(span.kind, span.graph, span.index, span.start, span.end) for span in spans if span.lane == "compute"]
    assert told[3:] == [
        ("wait", 0, 1, 6, 11),
        ("forward", 0, 0, 11, 12),
        ("forward", 0, 1, 12, 14),
        ("forward", 0, 2, 14, 15),
        ("forward", 1, 0, 15, 19),
    ]
    slow = simulate([first], Network(2, 500, 0))
    told = [(span.kind, span.graph, span.index, span.start, span.end) for span in slow if span.lane == "compute"]
    assert told[2:] == [
        ("wait", 0, 1, 3, 13),
        ("forward", 0, 0, 13, 14),
        ("forward", 0, 1, 14, 16),
        ("wait", 0, 2, 16, 19),
        ("forward", 0, 2, 19, 20),
        ("wait", 0, 0, 20, 23),
    ]
    assert (length(slow), computed(slow), sum(waits(slow).values())) == (23, 7, 16)


def chain(width: int = 64) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))


def late(model: nn.Module, **arguments: Any) -> dict[str, Any]:
    return {"overlap": "next_forward", "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), **arguments}


def test_waits_in_the_next_forward_are_those_of_the_compiled_program() -> None:
    model = chain(128)
    settings = late(model, bucket_mb=0.08, first_bucket_mb=0.05, inner="aot_eager")
    backend = fxddp.backend(**settings)
    compiled = torch.compile(model, backend=backend)
    compiled(torch.randn(60, 128)).sum().backward()
    told: dict[str, Any] = {"world_size": 8, "bandwidth": "200Mbit/s", "flops": 3e9}
    dry = fxddp.explain(model, torch.randn(60, 128), **settings, **told)
    (compilation,) = [site.compilation for site in backend.sites]
    assert compilation.forward is not None and compilation.backward is not None
    program = compilation.backward.program
    piece_of = {p: k for k, step in enumerate(compilation.forward.program.steps) for p in step.reads}
    needed = [min(piece_of[grad.input] for grad in bucket.grads) for bucket in program.plan.buckets]
    assert len(set(needed)) > 2
    for found in (dry, fxddp.explain(compiled, **told)):
        assert [bucket.needed for bucket in found.buckets] == needed
        assert found.timeline[0].kind == "piece"
        assert sum(span.kind == "forward" for span in found.timeline) == len(compilation.forward.program.steps)
        assert found.computing == pytest.approx(found.graphs[0].forward_seconds + found.graphs[0].seconds)
        assert sum(bucket.exposed or 0 for bucket in found.buckets) == pytest.approx(found.exposed)
        assert "step, from a backward through the next forward: " in str(found)
        for bucket in found.buckets:
            assert re.search(rf"^ +{bucket.index} .*  forward {bucket.needed}  ", str(found), re.MULTILINE)
    sent = [span.index for span in dry.timeline if span.kind == "bucket"]
    assert sent != sorted(sent), "the one needed first does not queue behind all others"
    assert any(bucket.piece > bucket.index for bucket in dry.buckets), "some are held back"
    launched_with = {bucket: packed for packed, several in enumerate(program.launches) for bucket in several}
    trained = fxddp.explain(compiled, **told)
    assert [bucket.piece for bucket in trained.buckets] == [launched_with[bucket.index] for bucket in trained.buckets]
    usual = fxddp.explain(model, torch.randn(60, 128), **(settings | {"overlap": None}), **told)
    assert dry.computing == pytest.approx(usual.computing)
    assert 0 < dry.exposed < usual.exposed
    assert "awaited by" in str(dry) and "awaited by" not in str(usual)
    for found in (dry, usual):
        (mine,) = (size for size in found.sizes if size.bucket_mb == found.settings["bucket_mb"])
        assert mine.exposed == pytest.approx(found.exposed, abs=1e-12)
    other = fxddp.explain(model, torch.randn(60, 128), **(settings | {"bucket_mb": 0.1}), **told)
    (tried,) = (size for size in dry.sizes if size.bucket_mb == 0.1)
    assert tried.buckets == len(other.buckets)
    assert tried.exposed == pytest.approx(other.exposed, rel=0.02)


def test_a_parameter_of_several_graphs_is_waited_for_in_the_backward() -> None:
    model = Twice()
    found = explain(model, 8, **late(model))
    assert {bucket.needed for bucket in found.buckets} == {None}
    assert found.timeline[0].kind == "forward"


def test_what_is_exposed_adds_up() -> None:
    found = explain(Net(), world_size=64, bandwidth="1Gbit/s", latency=0)
    late = sum(span.seconds for span in found.timeline if span.kind == "wait" and span.graph == UNCOVERED)
    assert found.seconds == pytest.approx(found.computing + found.exposed)
    assert sum(bucket.exposed or 0 for bucket in found.buckets) + late == pytest.approx(found.exposed)
    assert sum(piece.seconds for graph in found.graphs for piece in graph.pieces) == pytest.approx(
        found.computing - sum(graph.forward_seconds for graph in found.graphs)
    )
    (bucket,) = (bucket for bucket in found.buckets if bucket.index == 0 and bucket.graph == 0)
    assert bucket.predicted == pytest.approx(2 * 63 / 64 * bucket.nbytes / 125e6)


def test_it_leaves_the_model_as_it_was() -> None:
    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(())
    for measure in (False, True):
        torch.manual_seed(3)
        fxddp.explain(model, torch.ones(6, 8), inner="aot_eager", measure=measure)
        assert torch.rand(()) == expected
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())


def test_it_plans_as_training_does() -> None:
    model = Net()
    planned = explain(model)
    backend = fxddp.backend(0.001, inner="aot_eager")
    compiled = torch.compile(model, backend=backend)
    compiled(torch.randn(6, 8)).sum().backward()
    trained = fxddp.explain(compiled)
    assert [g.digest for g in trained.graphs] == [g.digest for g in planned.graphs]
    assert [g.digest for g in trained.graphs] == [plan.digest() for plan in backend.plans]
    assert trained.buckets == planned.buckets
    assert "no compiled graph so far" in trained.uncovered["odd.linear.weight"]
    assert trained.graphs[0].backward == ""
    assert trained.model == "Net"


def kept_backends() -> set[int]:
    """Ids of what explained something and is still alive."""
    gc.collect()
    return {id(kept) for kept in gc.get_objects() if type(kept) is DryBackend}


def test_it_explains_every_time_as_the_first_time() -> None:
    """Dynamo remembers shapes, counts what it compiled of a code, and keeps it: none of that may come of it."""
    model = Deep()
    before = kept_backends()  # Dynamo keeps those of graphs that a break ended in the globals of the frame's module
    for size in range(2, 12):  # more often than Dynamo's recompile limit
        found = explain(model, x=torch.randn(size, 8))
        assert [piece.cost for piece in found.graphs[0].pieces] == [""] * len(found.graphs[0].pieces)
    assert kept_backends() <= before
    compiled = torch.compile(model, backend=fxddp.backend(inner="aot_eager"))
    compiled(torch.randn(6, 8)).sum().backward()
    (graph,) = fxddp.explain(compiled).graphs
    assert graph.pieces[0].cost == ""


@pytest.mark.skipif("isolate_recompiles" not in inspect.signature(torch.compile).parameters, reason="torch before 2.13")
def test_what_trains_goes_on_with_its_graphs() -> None:
    model = Deep()
    compiled = torch.compile(model, backend=fxddp.backend(inner="aot_eager"))
    compiled(torch.randn(6, 8)).sum().backward()
    for size in range(2, 12):
        explain(model, x=torch.randn(size, 8))
    compiled(torch.randn(6, 8)).sum().backward()
    assert len(fxddp.explain(compiled).graphs) == 1
    compiled(torch.randn(3, 8)).sum().backward()
    assert len(fxddp.explain(compiled).graphs) == 2


def test_a_compiled_model_with_inputs_keeps_its_own_settings() -> None:
    compiled = torch.compile(Net(), backend=fxddp.backend(0.002, first_bucket_mb=0.0005, inner="aot_eager"))
    found = fxddp.explain(compiled, torch.randn(6, 8), first_bucket_mb=0.001)
    assert found.settings["bucket_mb"] == pytest.approx(0.002, rel=1e-3)
    assert found.settings["first_bucket_mb"] == pytest.approx(0.001, rel=1e-3)
    assert fxddp.backend_of(compiled).sites == []


def test_inductor_plans_without_compiling_the_pieces() -> None:
    found = fxddp.explain(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4), world_size=8)
    assert found.graphs[0].nbytes == 4 * (16 + 4)


def test_measured_times_are_those_of_the_pieces() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    found = fxddp.explain(model, torch.randn(512, 256), world_size=2, bucket_mb=0.3, inner="aot_eager", measure=True)
    (graph,) = found.graphs
    assert graph.measured is not None and 0 < graph.measured < 1
    assert all(piece.measured is not None and 0 < piece.measured < 1 for piece in graph.pieces)
    assert sum(piece.seconds for piece in graph.pieces) == pytest.approx(graph.seconds)
    assert "measured" in str(found)


def test_tied_parameters_are_one_with_several_names() -> None:
    found = fxddp.explain(Tied(), torch.arange(4), inner="aot_eager")
    assert found.tied == {"tokens.weight": ("head.weight",)}
    assert [bucket.names for bucket in found.buckets] == [("tokens.weight",)]
    assert "tied: tokens.weight = head.weight" in str(found)


def test_a_model_without_data_and_a_device_that_is_not_there() -> None:
    with torch.device("meta"):
        model = Net()
    planned = explain(Net(), world_size=8)
    found = planned
    for device in (None, "cuda"):
        torch._dynamo.reset()
        found = fxddp.explain(
            model,
            torch.empty(6, 8, device="meta"),
            world_size=8,
            bucket_mb=0.001,
            inner="aot_eager",
            device=device,
        )
        assert [graph.digest for graph in found.graphs] == [graph.digest for graph in planned.graphs]
        assert {bucket.device for bucket in found.buckets} == {device or "cpu"}
        assert [p.state for p in found.parameters] == [p.state for p in planned.parameters]
    assert all(p.is_meta for p in model.parameters())
    assert found.machine.flops > planned.machine.flops
    assert found.graphs[0].pieces[0].flops == planned.graphs[0].pieces[0].flops
    if not torch.cuda.is_available():
        assert "no cuda" in found.notes[0]


def test_dynamic_sizes_are_told_as_expressions() -> None:
    model, x = nn.Linear(8, 4), torch.randn(6, 8)
    torch._dynamo.mark_dynamic(x, 0)
    found = fxddp.explain(model, x, inner="aot_eager")
    torch._dynamo.reset()
    static = fxddp.explain(model, torch.randn(6, 8), inner="aot_eager")
    assert "s" in found.graphs[0].pieces[0].cost
    assert static.graphs[0].pieces[0].cost == ""
    assert found.graphs[0].pieces[0].flops == static.graphs[0].pieces[0].flops


def test_other_bucket_sizes_are_tried() -> None:
    found = explain(Net(), world_size=8, bandwidth="1Gbit/s")
    auto, *tried = (size.bucket_mb for size in found.sizes)
    assert (auto, tried) == ("auto", sorted(tried))
    (mine,) = (size for size in found.sizes if size.bucket_mb == found.settings["bucket_mb"])
    assert mine.buckets == len(found.buckets)
    assert mine.exposed == pytest.approx(found.exposed, abs=1e-12)
    again = explain(Net(), world_size=8, bandwidth="1Gbit/s", bucket_mb=0.25)
    (other,) = (size for size in found.sizes if size.bucket_mb == 0.25)
    assert isinstance(other, Size)
    assert other.buckets == len(again.buckets)
    assert other.exposed == pytest.approx(again.exposed, rel=0.2)


def test_advice_has_figures() -> None:
    found = explain(Net(), world_size=64, bandwidth="1Gbit/s")
    said = "\n".join(found.advice)
    assert "2 parameters (16.25 KiB) outside of the graphs, " in said
    assert "is latency" in said
    assert f"{units.duration(found.exposed)} of sending" in said


def test_a_report_survives_json() -> None:
    found = explain(Net(), world_size=64)
    again = fxddp.Explanation.from_dict(json.loads(found.to_json(code=True)))
    assert again == found
    short = json.loads(found.to_json())
    assert short["schema"] == 1
    assert short["graphs"][0]["buckets"][0]["gradients"][0]["name"] == found.buckets[0].gradients[0].name
    assert short["graphs"][0]["passes"][1]["code"] == short["graphs"][0]["forward"] == ""
    assert str(fxddp.Explanation.from_dict(short)) == str(found)
    with pytest.raises(ValueError, match="schema is 7"):
        fxddp.Explanation.from_dict({"schema": 7})
    with pytest.raises(ValueError, match="not a saved report"):
        fxddp.Explanation.from_dict({"schema": 1, "graphs": 3})


def test_the_trace_has_predicted_and_recorded_rows(tmp_path: Path) -> None:
    found = explain(Net(), world_size=64)
    found.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(found.timeline)
    for event, span in zip(spans, found.timeline, strict=True):
        assert (event["ts"], event["dur"]) == (pytest.approx(span.start * 1e6), pytest.approx(span.seconds * 1e6))
    launched = [b for graph in reversed(found.graphs) for b in graph.buckets]  # numbered as in a profile
    for number, bucket in enumerate(launched):
        (sent,) = (event for event in spans if event["name"] == f"fxddp.bucket{number}.allreduce")
        assert (sent["args"]["bytes"], sent["ts"]) == (bucket.nbytes, pytest.approx((bucket.start or 0) * 1e6))
    pieces = [event["name"] for event in spans if event["cat"] == "piece"]
    assert pieces == [f"fxddp.piece{number}" for number in range(sum(len(graph.pieces) for graph in found.graphs))]
    outside = [event["name"] for event in spans if event["cat"] == "uncovered"]
    assert outside == ["fxddp.bucketoutside.allreduce"] * len(outside) != []
    rows = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"}
    assert {name for _, name in rows} == {"compute", "network"}
    for (pid, tid), same in itertools.groupby(
        sorted(spans, key=lambda e: (e["pid"], e["tid"], e["ts"])), key=lambda e: (e["pid"], e["tid"])
    ):
        end = 0.0
        for event in same:
            assert event["ts"] >= end - 1e-3, (pid, tid)
            end = event["ts"] + event["dur"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "not compiled with fxddp.*; or give explain the inputs"),
        ({"bucket_mb": 1}, r"needs the inputs of one forward to plan with \['bucket_mb'\]"),
        ({"device": "cuda"}, "needs the inputs"),
        ({"world_size": 0}, "world_size must be a whole number, at least 1"),
        ({"world_size": True}, "world_size must be a whole number"),
        ({"device": "abacus"}, "'abacus' is no device that torch knows"),
        ({"memory_bandwidth": 0, "kwargs": {"input": torch.ones(1, 2)}}, "memory_bandwidth must be a positive"),
        ({"latency": -1, "kwargs": {"input": torch.ones(1, 2)}}, "latency must be a finite number, not negative"),
        ({"bandwidth": "fast", "kwargs": {"input": torch.ones(1, 2)}}, "bandwidth must be like 100Gbit/s"),
        ({"latency": "1 fortnight", "kwargs": {"input": torch.ones(1, 2)}}, "latency must be like 5us"),
        ({"flops": -1, "kwargs": {"input": torch.ones(1, 2)}}, "flops must be a positive, finite number"),
        ({"measure": True, "device": "cuda", "kwargs": {"input": torch.ones(1, 2)}}, "needs real weights"),
    ],
)
def test_what_cannot_be_explained_is_refused(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fxddp.explain(nn.Linear(2, 2), **arguments)


def test_an_argument_that_nobody_knows_is_named() -> None:
    with pytest.raises(TypeError, match=r"bucket_gb is neither an argument of explain nor of fxddp\.backend"):
        fxddp.explain(nn.Linear(2, 2), torch.ones(1, 2), bucket_gb=1)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match="needs a model, a function or what was compiled of one, got NoneType"):
        fxddp.explain(None, torch.ones(1))


def test_nothing_to_send_is_told() -> None:
    for model in (nn.Flatten(), nn.Linear(8, 8).requires_grad_(False)):
        assert "nothing that this forward returns depends on what requires grad" in str(explain(model, 4))
    assert "nothing that this forward" not in str(explain(Looped(), 4))


def test_inputs_for_a_backend_are_refused() -> None:
    with pytest.raises(ValueError, match="pass the model and its inputs"):
        fxddp.explain(fxddp.backend(), torch.ones(1))


@pytest.mark.parametrize(
    ("text", "value"),
    [("100Gbit/s", 12.5e9), ("12.5 GB/s", 12.5e9), ("1GiB/s", 2**30), ("800Mbps", 1e8), (5, 5.0), ("8 bit/s", 1.0)],
)
def test_bandwidths_are_read(text, value: float) -> None:
    assert units.bandwidth(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0499992, "0.05"), (12345, "12300"), (999.96, "1000"), (25.0, "25"), (1.23456e-5, "0.0000123"), (0, "0")],
)
def test_figures_are_rounded_to_three_digits(value: float, shown: str) -> None:
    assert units.figures(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(1.2345, "1.23 s"), (0.00099996, "1 ms"), (4.2e-8, "42 ns"), (12345.0, "12300 s"), (0, "0"), (None, "–")],
)
def test_durations_have_a_unit(seconds: float | None, shown: str) -> None:
    assert units.duration(seconds) == shown


@pytest.mark.parametrize(("text", "value"), [("5us", 5e-6), ("1.5 ms", 1.5e-3), ("2s", 2.0), (0, 0.0), (1e-5, 1e-5)])
def test_latencies_are_read(text, value: float) -> None:
    assert units.seconds(text) == pytest.approx(value)
