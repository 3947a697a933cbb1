"""What would make a step faster, each with the figures it rests on. Advice is read off the predicted step."""

from collections.abc import Iterator

from fxddp.config import AUTO

from .report import Explanation, Parameter
from .units import duration, number, size

WORTH = 0.02
"""Shares of a step below this are not worth a word."""


def advise(found: Explanation) -> Iterator[str]:
    """Sentences, the most telling first."""
    yield from _eager(found)
    yield from _size(found)
    yield from _first(found)
    yield from _latency(found)
    yield from _tail(found)
    yield from _unused(found)


def _state(found: Explanation, state: str) -> list[Parameter]:
    return [parameter for parameter in found.parameters if parameter.state == state]


def _eager(found: Explanation) -> Iterator[str]:
    eager = _state(found, "eager")
    if not eager:
        return
    nbytes = sum(parameter.nbytes for parameter in eager)
    where = list(dict.fromkeys(f"{p.source}" for p in eager if p.source is not None))
    cost = ""
    if found.network is not None:
        sent = sum(span.seconds for span in found.timeline if span.kind == "uncovered")
        cost = f", {duration(sent)} of sending that nothing hides"
    at = f": compile what runs at {where[0]}" if where else ""
    yield f"{len(eager)} parameters ({size(nbytes)}) are used outside of the graphs{cost}{at}"


def _size(found: Explanation) -> Iterator[str]:
    now = found.settings["bucket_mb"]
    current = next((each for each in found.sizes if each.bucket_mb == now), None)
    if current is None:
        return
    best = min(found.sizes, key=lambda each: (each.exposed, each.buckets))
    gain = current.exposed - best.exposed
    if gain > WORTH * found.seconds:
        yield (
            f"bucket_mb={number(best.bucket_mb)} ({best.buckets} buckets) would expose {duration(best.exposed)} of "
            f"sending instead of {duration(current.exposed)} with {number(now)}: {gain / found.seconds:.0%} of the step"
        )


def _first(found: Explanation) -> Iterator[str]:
    if not found.graphs or not found.graphs[-1].buckets or found.exposed <= WORTH * found.seconds:
        return
    graph = found.graphs[-1]  # the last forward is the first backward
    first = graph.buckets[0]
    ranked = sorted(first.gradients, key=lambda gradient: gradient.before)
    last = ranked[-1]
    if last.before < 0.3 or len(graph.buckets) < 2:
        return
    if found.settings["bucket_mb"] == AUTO:
        return
    earlier = f"; without it, it could leave after {ranked[-2].before:.0%}" if len(ranked) > 1 else ""
    yield (
        f"the first bucket waits for {last.name}, ready after {last.before:.0%} of the backward{earlier}: "
        f"a smaller first_bucket_mb than {found.settings['first_bucket_mb']:g} starts the network sooner"
    )


def _latency(found: Explanation) -> Iterator[str]:
    network = found.network
    if network is None or found.sending == 0 or found.exposed <= WORTH * found.seconds:
        return
    count = sum(1 for span in found.timeline if span.lane == "network")
    delay = count * network.delay
    if delay > found.sending / 2:
        yield (
            f"{delay / found.sending:.0%} of the sending is latency: {count} all-reduces of {duration(network.delay)} "
            f"each before the first byte; larger buckets need fewer"
        )


def _tail(found: Explanation) -> Iterator[str]:
    late = [bucket for bucket in found.buckets if bucket.exposed]
    if not late or found.exposed <= WORTH * found.seconds:
        return
    share = found.exposed / found.seconds
    bound = "; the network is the bottleneck" if found.sending > found.computing else ""
    yield (
        f"{duration(found.exposed)} of sending ({share:.0%} of the step) is exposed, in {len(late)} of "
        f"{len(found.buckets)} buckets{bound}"
    )


def _unused(found: Explanation) -> Iterator[str]:
    unused = _state(found, "unused")
    if unused:
        nbytes = sum(parameter.nbytes for parameter in unused)
        yield f"{len(unused)} parameters ({size(nbytes)}) are not used by this forward and keep their .grad"
