"""Two reports side by side: two bucket sizes, two versions of a model, two machines."""

from dataclasses import dataclass

from fxddp.units import duration, mib, share, size

from .report import Explanation


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of both reports.

    Attributes:
        name: what it is.
        before, after: its value; bytes, seconds, a count or a share. None where one does not have it.
        shown: both as text.
    """

    name: str
    before: float | None
    after: float | None
    shown: tuple[str, str]

    @property
    def change(self) -> str:
        """How much it grew or shrank."""
        if not self.before or self.after is None:
            return "" if self.before == self.after else "new"
        grown = self.after / self.before - 1
        return f"{grown:+.1%}" if grown else "same"


def figures(before: Explanation, after: Explanation) -> tuple[Row, ...]:
    """What two reports have in common, as numbers."""
    found = []
    for name, kind in (
        ("seconds", duration),
        ("computing", duration),
        ("exposed", duration),
        ("sending", duration),
        ("overlap", share),
        ("nbytes", size),
        ("wire_bytes", size),
    ):
        values = getattr(before, name), getattr(after, name)
        found.append(Row(name, *values, (kind(values[0]), kind(values[1]))))
    counts = {
        "buckets": (len(before.buckets), len(after.buckets)),
        "graphs": (len(before.graphs), len(after.graphs)),
        "parameters": (len(before.parameters), len(after.parameters)),
        "outside": (len(before.uncovered), len(after.uncovered)),
    }
    return (*found, *(Row(name, *both, (str(both[0]), str(both[1]))) for name, both in counts.items()))


def compare(before: Explanation, after: Explanation) -> str:
    """A table of both, what their settings and plans differ in, and which is faster."""
    rows = figures(before, after)
    titles = ["", _title(before), _title(after), ""]
    table = [titles, *([row.name, *row.shown, row.change] for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(4)]
    lines = [
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}".rstrip()
        for row in table
    ]
    names = sorted({*before.settings, *after.settings})
    differing = [name for name in names if before.settings.get(name) != after.settings.get(name)]
    lines += [""] * bool(differing)
    lines += [f"{name}: {_plain(before.settings.get(name))} → {_plain(after.settings.get(name))}" for name in differing]
    lines += _moved(before, after)
    gain = before.seconds - after.seconds
    lines += ["", "the same predicted step" if not gain else f"the second is {_faster(gain, before.seconds)}"]
    return "\n".join(lines)


def _faster(gain: float, base: float) -> str:
    part = f" ({abs(gain) / base:.1%})" if base else ""
    return f"predicted to be {duration(abs(gain))} a step{part} {'faster' if gain > 0 else 'slower'}"


def _plain(value: object) -> str:
    return mib(value) if isinstance(value, float) else str(value)


def _title(found: Explanation) -> str:
    ranks = f" ×{found.world_size}" if found.world_size else ""
    each = found.settings.get("bucket_mb", 0)
    return f"{found.model}{ranks}, {each if isinstance(each, str) else f'{mib(each)} MiB'}"


def _moved(before: Explanation, after: Explanation) -> list[str]:
    """Parameters that came, went, or changed what becomes of them."""
    old = {parameter.name: parameter.state for parameter in before.parameters}
    new = {parameter.name: parameter.state for parameter in after.parameters}
    lines = []
    for title, names in (
        ("only in the first", [name for name in old if name not in new]),
        ("only in the second", [name for name in new if name not in old]),
    ):
        if names:
            lines.append(f"{title}: {', '.join(names[:6])}{f', … ({len(names)} in all)' if len(names) > 6 else ''}")
    changed = [(name, state, new[name]) for name, state in old.items() if name in new and new[name] != state]
    lines += [f"{name}: {was} → {now}" for name, was, now in changed[:12]]
    if len(changed) > 12:
        lines.append(f"… and {len(changed) - 12} more")
    return ["", *lines] if lines else []
