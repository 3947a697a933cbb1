"""The page of `fxddp.explain` in a real browser: it loads, and its numbers are the object's."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxddp
from fxddp import units
from fxddp.explain import Bucket, Graph, Parameter
from tests.test_explain import Net, chain, late

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium or Chrome is installed here")


class Elements(HTMLParser):
    """All elements of a page with their attributes and the text inside them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str], list[str]]] = []
        self._open: list[tuple[str, list[str]]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        text: list[str] = []
        self.found.append((tag, {name: value or "" for name, value in attrs}, text))
        if tag not in ("meta", "input", "br", "link"):
            self._open.append((tag, text))

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        for _, text in self._open:
            text.append(data)

    def having(self, attribute: str) -> list[tuple[dict[str, str], str]]:
        return [(attributes, "".join(text)) for _, attributes, text in self.found if attribute in attributes]


def browse(path: Path, folder: Path, *arguments: str, theme: str = "light") -> subprocess.CompletedProcess:
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", *arguments, f"file://{path}#theme={theme}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def loaded(found: fxddp.Explanation, folder: Path, script: str = "") -> Elements:
    """What a browser makes of the page, after a script that does what a reader does."""
    found.save(folder / "report.html")
    if script:
        page = (folder / "report.html").read_text().replace("</body>", f"<script>{script}</script></body>")
        (folder / "report.html").write_text(page)
    dom = browse(folder / "report.html", folder, "--dump-dom", "--virtual-time-budget=5000").stdout
    elements = Elements(dom)
    _, attributes, _ = elements.found[0]
    assert "data-errors" not in attributes, attributes["data-errors"]
    assert attributes.get("data-ready") == "true"
    return elements


def check_numbers(found: fxddp.Explanation, elements: Elements) -> None:
    figures = {attributes["data-figure"]: (attributes, text) for attributes, text in elements.having("data-figure")}
    for name in ("seconds", "computing", "exposed", "overlap", "nbytes"):
        assert float(figures[name][0]["data-value"]) == pytest.approx(getattr(found, name), abs=1e-12)
    assert figures["seconds"][1].startswith(units.duration(found.seconds))
    assert figures["exposed"][1].startswith(units.duration(found.exposed))
    assert figures["nbytes"][1].startswith(units.size(found.nbytes))
    assert figures["sent"][1].startswith(units.size(found.network.sent(found.wire_bytes)))  # type: ignore[union-attr]
    rows = {attributes["data-bucket"]: (attributes, text) for attributes, text in elements.having("data-bucket")}
    for bucket in found.buckets[-200:]:
        attributes, text = rows[f"{bucket.graph}.{bucket.index}"]
        assert int(attributes["data-bytes"]) == bucket.nbytes
        assert float(attributes["data-exposed"]) == pytest.approx(bucket.exposed)
        assert int(attributes["data-count"]) == len(bucket.gradients)
        for shown in (units.size(bucket.nbytes), bucket.dtype, f"piece {bucket.piece}", bucket.last.name):
            assert shown in text
        assert units.duration(bucket.predicted) in text
    states = {
        attributes["data-state"]: int(attributes["data-count"]) for attributes, _ in elements.having("data-state")
    }
    names = [parameter.state for parameter in found.parameters]
    assert states == {state: names.count(state) for state in set(names) - {"bucket"}}
    drawn = [attributes["data-kind"] for attributes, _ in elements.having("data-kind")]
    assert 0 < len(drawn) <= len(found.timeline)


@pytest.fixture(scope="module")
def small() -> fxddp.Explanation:
    torch._dynamo.reset()
    return fxddp.explain(Net(), torch.randn(6, 8), world_size=64, bucket_mb=0.001, inner="aot_eager")


@in_a_browser
def test_the_page_shows_what_travels_and_how(tmp_path: Path) -> None:
    torch._dynamo.reset()
    arguments: dict[str, Any] = {"bucket_mb": 0.001, "inner": "aot_eager", "comm_hook": "fp16", "algorithm": "ring"}
    found = fxddp.explain(Net(), torch.randn(6, 8), world_size=64, **arguments)
    elements = loaded(found, tmp_path)
    check_numbers(found, elements)
    figures = {attributes["data-figure"]: text for attributes, text in elements.having("data-figure")}
    assert figures["wire_bytes"] == f"{units.size(found.wire_bytes)}after compression by fp16"
    rows = {attributes["data-bucket"]: text for attributes, text in elements.having("data-bucket")}
    for bucket in found.buckets:
        text = rows[f"{bucket.graph}.{bucket.index}"]
        assert units.size(bucket.wire_bytes) in text
        assert bucket.route in text


@in_a_browser
def test_the_page_shows_waits_in_the_next_forward(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = chain()
    settings = late(model, bucket_mb=0.04, first_bucket_mb=0.02, inner="aot_eager")
    found = fxddp.explain(model, torch.randn(60, 64), world_size=8, bandwidth="100Mbit/s", **settings)
    elements = loaded(found, tmp_path)
    check_numbers(found, elements)
    figures = {attributes["data-figure"]: text for attributes, text in elements.having("data-figure")}
    assert figures["seconds"].endswith("a step, from a backward through the next forward")
    rows = {attributes["data-bucket"]: text for attributes, text in elements.having("data-bucket")}
    for bucket in found.buckets:
        assert f"forward {bucket.needed}" in rows[f"{bucket.graph}.{bucket.index}"]
    drawn = [(int(attributes["data-index"]), attributes["data-kind"]) for attributes, _ in elements.having("data-kind")]
    assert sorted(index for index, kind in drawn if kind == "wait") == sorted(
        span.index for span in found.timeline if span.kind == "wait"
    )


def large(small: fxddp.Explanation, count: int = 10_000) -> fxddp.Explanation:
    """The report of a model of so many parameters, without waiting for Dynamo to trace one."""
    per_bucket = 20
    template = small.buckets[0]
    buckets, parameters = [], []
    for index in range(count // per_bucket):
        names = [f"stages.{index // 50}.blocks.{index % 50}.weight{i}" for i in range(per_bucket)]
        gradients = tuple(replace(template.gradients[0], name=name, nbytes=4096, ready=index) for name in names)
        nbytes = 4096 * per_bucket
        times = (1e-4, index * 1e-4, 1e-3, 0.0)
        bucket = Bucket(0, index, nbytes, nbytes, "float32", "cpu", gradients, index, "all-reduce", *times)
        buckets.append(bucket)
        parameters += [Parameter(name, (1024,), "float32", 4096, "bucket", graph=0, bucket=index) for name in names]
    piece = small.graphs[0].pieces[0]
    pieces = tuple(replace(piece, index=i, bucket=i, code="x" * 500) for i in range(len(buckets)))
    graph = Graph(0, 60_000, "", tuple(buckets), pieces, small.graphs[0].passes, predicted=1e-3, forward="y" * 10**6)
    spans = tuple(
        replace(small.timeline[0], lane=lane, kind=kind, graph=0, index=i, start=i * 1e-4, end=(i + 1) * 1e-4)
        for lane, kind in (("compute", "piece"), ("network", "bucket"))
        for i in range(len(buckets))
    )
    return replace(small, graphs=(graph,), parameters=tuple(parameters), timeline=spans, breaks=(), advice=())


def test_a_page_needs_nothing_but_itself(small: fxddp.Explanation, tmp_path: Path) -> None:
    small.save(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    outside = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    assert set(re.findall(r"https?://[^\"' ]+", outside)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(link|img|iframe)|@import|\burl\(|\bsrc=|fetch\(|XMLHttp", outside)
    assert "default-src 'none'" in outside
    assert "<!--" not in outside.replace("<!doctype", "")


def test_a_page_holds_the_report(small: fxddp.Explanation, tmp_path: Path) -> None:
    odd = replace(small, model="a </script><b>model & co")
    odd.save(tmp_path / "report.html")
    again = fxddp.Explanation.load(tmp_path / "report.html")
    assert json.loads(again.to_json()) == json.loads(odd.to_json())
    assert again.graphs[0].passes[1].diff == small.graphs[0].passes[1].diff


@in_a_browser
def test_the_page_shows_the_numbers_of_the_object(small: fxddp.Explanation, tmp_path: Path) -> None:
    elements = loaded(small, tmp_path)
    check_numbers(small, elements)
    text = "".join(elements.found[0][2])
    for parameter in small.parameters:
        if parameter.state != "bucket":
            assert parameter.name in text
    for advice in small.advice:
        assert advice in text
    for record in small.graphs[0].passes:
        assert f"pass {record.name}" in text
    assert "Net on 64 ranks" in text


@in_a_browser
def test_the_page_shows_what_auto_knows_of_the_processor(small: fxddp.Explanation, tmp_path: Path) -> None:
    assert small.network is not None
    network = replace(small.network, cpu_per_call=2e-5, cpu_per_byte=1e-9)
    auto = {**small.settings, "bucket_mb": "auto"}
    told = f"sending takes 20 µs a bucket and {units.duration(1e-9 * network.sent(1 << 20))} a MiB"
    for changes, shown in (
        ({"network": network, "settings": auto}, True),
        ({"network": network}, False),
        ({"settings": auto}, False),
        ({"network": replace(network, world_size=1), "settings": auto}, False),
    ):
        text = "".join(loaded(replace(small, **changes), tmp_path).found[0][2])
        assert (told in text) == shown, changes
        assert ('"auto" knows sending takes ' in text.replace("knows sending takes ${", "")) == shown, changes


@in_a_browser
def test_a_name_is_shown_as_it_is(small: fxddp.Explanation, tmp_path: Path) -> None:
    elements = loaded(replace(small, model="a </script><b id=x>model & co"), tmp_path)
    assert not [attributes for attributes, _ in elements.having("id") if attributes["id"] == "x"]
    assert "a </script><b id=x>model & co on 64 ranks" in [
        text for a, text in elements.having("id") if a["id"] == "title"
    ]


@in_a_browser
def test_a_model_with_ten_thousand_parameters(small: fxddp.Explanation, tmp_path: Path) -> None:
    found = large(small)
    elements = loaded(found, tmp_path)
    rows = elements.having("data-bucket")
    assert len(rows) == 200
    assert [int(attributes["data-bytes"]) for attributes, _ in rows] == [b.nbytes for b in found.buckets[:200]]
    assert "show all 500" in "".join(elements.found[0][2])
    styles = [attributes.get("style", "") for attributes, _ in elements.having("title")]
    parts = [float(style.removeprefix("width: ").partition("%")[0]) for style in styles if style.startswith("width: ")]
    assert sum(parts[:300]) == pytest.approx(100, abs=0.1), "the bar of the whole model is full"
    assert (tmp_path / "report.html").stat().st_size < 8e6


@in_a_browser
@pytest.mark.parametrize("model", [nn.Flatten(), nn.Linear(8, 4).requires_grad_(False), nn.Linear(8, 4)])
def test_there_is_a_page_for_whatever_was_found(model: nn.Module, tmp_path: Path) -> None:
    torch._dynamo.reset()
    loaded(fxddp.explain(model, torch.randn(6, 8), inner="aot_eager"), tmp_path)


@in_a_browser
def test_the_table_is_sorted_by_the_column_that_is_clicked(small: fxddp.Explanation, tmp_path: Path) -> None:
    click = "[...document.querySelectorAll('#buckets th')].find((h) => h.textContent === 'bytes').click();"
    for clicks, largest_first in ((click, True), (click * 2, False)):
        rows = loaded(small, tmp_path, clicks).having("data-bucket")
        shown = [int(attributes["data-bytes"]) for attributes, _ in rows]
        assert shown == sorted((bucket.nbytes for bucket in small.buckets), reverse=largest_first)


@in_a_browser
def test_a_bucket_is_found_by_parameter_and_opened(small: fxddp.Explanation, tmp_path: Path) -> None:
    find = "const box = document.getElementById('filter'); box.value = 'OUTER'; box.dispatchEvent(new Event('input'));"
    elements = loaded(small, tmp_path, find + "document.querySelector('#buckets tr.row').click();")
    assert [attributes["data-bucket"] for attributes, _ in elements.having("data-bucket")] == ["1.0"]
    ((_, opened),) = elements.having("data-of")
    for gradient in small.graphs[1].buckets[0].gradients:
        assert gradient.name in opened
        assert gradient.node in opened


@in_a_browser
def test_the_timeline_zooms(tmp_path: Path) -> None:
    """Some pieces are too short to be drawn beside all that is sent."""
    torch._dynamo.reset()
    arguments: dict[str, Any] = {"bucket_mb": 0.001, "inner": "aot_eager", "latency": "50us"}
    small = fxddp.explain(Net(), torch.randn(6, 8), world_size=64, **arguments)
    wheel = (
        "document.querySelector('#timeline svg').dispatchEvent(new WheelEvent('wheel', {deltaY: -3000, clientX: 110}));"
    )
    before = [a["data-kind"] for a, _ in loaded(small, tmp_path).having("data-kind")]
    zoomed = [a["data-kind"] for a, _ in loaded(small, tmp_path, wheel).having("data-kind")]
    assert before.count("uncovered") > zoomed.count("uncovered")
    assert zoomed.count("piece") > before.count("piece")


@in_a_browser
def test_graphs_and_differences_unfold(small: fxddp.Explanation, tmp_path: Path) -> None:
    unfold = "document.querySelectorAll('details').forEach((each) => { each.open = true; });"
    text = "".join(loaded(small, tmp_path, unfold).found[0][2])
    for graph in small.graphs:
        assert graph.forward in text
        assert graph.passes[1].diff in text
        assert all(piece.code in text for piece in graph.pieces)


@in_a_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_is_drawn_in_light_and_dark(small: fxddp.Explanation, tmp_path: Path, theme: str) -> None:
    small.save(tmp_path / "report.html")
    picture = tmp_path / "picture.png"
    browse(tmp_path / "report.html", tmp_path, "--window-size=1280,1600", f"--screenshot={picture}", theme=theme)
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert picture.stat().st_size > 30_000
