"""What would make a step faster, each with the figures it rests on. Advice is read off the predicted step."""

from collections.abc import Iterator

from fxddp.config import AUTO
from fxddp.units import count, duration, mib, share, size

from .parts import Parameter
from .report import Explanation

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
    yield f"{count(len(eager), 'parameter')} ({size(nbytes)}) outside of the graphs{cost}{at}"


def _size(found: Explanation) -> Iterator[str]:
    now = found.settings["bucket_mb"]
    current = next((each for each in found.sizes if each.bucket_mb == now), None)
    if current is None:
        return
    best = min(found.sizes, key=lambda each: (each.exposed, each.buckets))
    gain = current.exposed - best.exposed
    if gain > WORTH * found.seconds:
        yield (
            f"bucket_mb={mib(best.bucket_mb)} ({count(best.buckets, 'bucket')}) would expose {duration(best.exposed)} "
            f"of sending instead of {duration(current.exposed)} with {mib(now)}: {share(gain / found.seconds)} of the "
            f"step"
        )


def _first(found: Explanation) -> Iterator[str]:
    if not found.graphs or not found.graphs[-1].buckets or found.exposed <= WORTH * found.seconds:
        return
    graph = found.graphs[-1]  # the last forward is the first backward
    first = graph.buckets[0]
    ranked = sorted(first.gradients, key=lambda gradient: gradient.before)
    last = ranked[-1]
    if last.before < 0.3 or len(graph.buckets) < 2 or len(ranked) < 2:
        return
    if found.settings["bucket_mb"] == AUTO or found.settings["bucket_cap_mb_list"]:
        return
    before = ranked[-2].before
    earlier = f"; without it, it could leave after {share(before)}" * (last.before - before > WORTH)
    yield (
        f"the first bucket waits for {last.name}, ready after {share(last.before)} of the backward{earlier}: a smaller "
        f"first_bucket_mb than {mib(found.settings['first_bucket_mb'])} starts the network sooner"
    )


def _latency(found: Explanation) -> Iterator[str]:
    network = found.network
    if network is None or found.sending == 0 or found.exposed <= WORTH * found.seconds:
        return
    sent = sum(1 for span in found.timeline if span.lane == "network")
    delay = sent * network.delay
    if delay > found.sending / 2:
        larger = "; larger buckets need fewer" * any(each.buckets < len(found.buckets) for each in found.sizes)
        yield (
            f"{share(delay / found.sending)} of the sending is latency: {count(sent, 'all-reduce')} of "
            f"{duration(network.delay)}{' each' * (sent > 1)} before the first byte{larger}"
        )


def _tail(found: Explanation) -> Iterator[str]:
    late = [bucket for bucket in found.buckets if bucket.exposed]
    if not late or found.exposed <= WORTH * found.seconds:
        return
    bound = "; the network is the bottleneck" if found.sending > found.computing else ""
    yield (
        f"{duration(found.exposed)} of sending ({share(found.exposed / found.seconds)} of the step) is exposed, in "
        f"{len(late)} of {count(len(found.buckets), 'bucket')}{bound}"
    )


def _unused(found: Explanation) -> Iterator[str]:
    unused = _state(found, "unused")
    if unused:
        nbytes = sum(parameter.nbytes for parameter in unused)
        yield f"{count(len(unused), 'parameter')} ({size(nbytes)}) not used by this forward: .grad stays as it is"
