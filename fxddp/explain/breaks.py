"""Where Dynamo ended graphs early, and why."""

import re

from fxddp.backend import Backend
from fxddp.passes.outline import innermost
from fxddp.site import Site

from .dry import Tried
from .parts import Break


def break_of(site: Site) -> Break | None:
    """What ended a graph; None if its frame ended with it."""
    return None if site.broken_by is None else Break(_plain(site.broken_by[0]), site.broken_by[1])


def _plain(reason: str) -> str:
    """Dynamo's explanation of a graph break in one line, without addresses and without the hints below it."""
    lines = [re.sub(r" at 0x[0-9a-f]+", "", line).strip() for line in reason.strip().splitlines()]
    if lines and lines[0].startswith("generic_jump"):
        return "a branch on the value of a tensor"
    explained = (line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: "))
    return next(explained, lines[0] if lines else "")


def breaks_of(backend: Backend, tried: Tried | None) -> list[Break]:
    """Each place once; a dry run hears of those before any graph, too."""
    found = [each for site in backend.sites if (each := break_of(site)) is not None]
    found += [Break(_plain(reason), innermost(trace)) for reason, trace in (tried.breaks if tried else ())]
    places: dict[object, Break] = {}
    for each in found:
        places.setdefault((each.source.file, each.source.line) if each.source else each.reason, each)
    return list(places.values())
