"""What changed between two printed graphs, in time linear in their length.

The lines of a printed graph are nearly all different, so lines that occur once in both texts are matched where they
keep their order ("patience diff", by Bram Cohen), and only what lies between them is compared piece by piece.
"""

import bisect
import difflib
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

SMALL = 400
CONTEXT = 2


def changes(before: str, after: str) -> str:
    """A unified diff of two texts without file names; "" if they are equal."""
    marked = _diff(before.splitlines(), after.splitlines())
    near = [False] * len(marked)
    for i, (mark, _) in enumerate(marked):
        if mark != " ":
            for j in range(max(0, i - CONTEXT), min(len(marked), i + CONTEXT + 1)):
                near[j] = True
    lines: list[str] = []
    old = new = 1
    for i, (mark, text) in enumerate(marked):
        if near[i] and (i == 0 or not near[i - 1]):
            lines.append(f"@@ line {old} → line {new} @@")
        if near[i]:
            lines.append(f"{mark} {text}".rstrip())
        old += mark != "+"
        new += mark != "-"
    return "\n".join(lines)


def _diff(before: Sequence[str], after: Sequence[str]) -> list[tuple[str, str]]:
    result: list[tuple[str, str]] = []
    anchors = [(-1, -1), *_anchors(before, after), (len(before), len(after))]
    for (i, j), (k, m) in pairwise(anchors):
        result += _small(before[i + 1 : k], after[j + 1 : m])
        if k < len(before):
            result.append((" ", before[k]))
    return result


def _anchors(before: Sequence[str], after: Sequence[str]) -> list[tuple[int, int]]:
    """Positions of lines that occur once in both, as many as keep their order."""
    once_before, once_after = _once(before), _once(after)
    pairs = [(i, once_after[line]) for line, i in once_before.items() if line in once_after]
    ends: list[int] = []
    tails: list[int] = []
    previous: list[int] = []
    for n, (_, j) in enumerate(pairs):  # the longest increasing subsequence
        place = bisect.bisect_left(ends, j)
        previous.append(tails[place - 1] if place else -1)
        ends[place : place + 1] = [j]
        tails[place : place + 1] = [n]
    chain: list[tuple[int, int]] = []
    n = tails[-1] if tails else -1
    while n >= 0:
        chain.append(pairs[n])
        n = previous[n]
    return chain[::-1]


def _once(lines: Sequence[str]) -> dict[str, int]:
    often = Counter(lines)
    return {line: i for i, line in enumerate(lines) if often[line] == 1}


def _small(before: Sequence[str], after: Sequence[str]) -> list[tuple[str, str]]:
    if not before or not after or len(before) + len(after) > SMALL:
        return [*(("-", line) for line in before), *(("+", line) for line in after)]
    found: list[tuple[str, str]] = []
    for tag, a, b, c, d in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag == "equal":
            found += [(" ", line) for line in before[a:b]]
        else:
            found += [("-", line) for line in before[a:b]] + [("+", line) for line in after[c:d]]
    return found
