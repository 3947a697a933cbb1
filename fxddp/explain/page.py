"""The report as one page of HTML that needs nothing but itself: style, script and figures stand in it.

The figures are the report's own `to_dict`, so a page can be read back with `Explanation.load`. Its Content-Security-
Policy forbids everything that would come over a network.
"""

import json
import re
from importlib.resources import files
from typing import Any

from .report import Explanation

LONGEST = 200_000
"""Characters of one piece of code that a page shows; the whole of it is in the object."""


def page(found: Explanation) -> str:
    """The page."""
    told = found.to_dict(code=True)
    for graph in told["graphs"]:
        for each in graph["passes"]:
            each["code"] = ""  # the first is in the graph, the others follow from the differences
        _shorten(graph)
    figures = json.dumps(told, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    assets = files("fxddp.explain") / "assets"
    parts = {
        "TITLE": _escaped(f"{found.model} · fxddp"),
        "STYLE": (assets / "page.css").read_text(encoding="utf-8"),
        "SCRIPT": (assets / "page.js").read_text(encoding="utf-8"),
        "REPORT": figures,
    }
    template = (assets / "page.html").read_text(encoding="utf-8")
    return re.sub(r"<!--(TITLE|STYLE|SCRIPT|REPORT)-->", lambda match: parts[match[1]], template)


def embedded(text: str) -> str:
    """The JSON of a report: the whole text, or what stands in a page."""
    match = re.search(r'<script type="application/json" id="report">(.*?)</script>', text, re.DOTALL)
    return text if match is None else match[1]


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _shorten(value: Any) -> None:
    """Cuts code that is too long for a page."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(item, str) and len(item) > LONGEST:
            left = item.count("\n", LONGEST)
            value[key] = f"{item[:LONGEST]}\n… {left} more lines: see the Explanation itself"
        elif isinstance(item, (dict, list)):
            _shorten(item)
        elif isinstance(item, tuple) and item and isinstance(item[0], dict):
            for each in item:
                _shorten(each)
