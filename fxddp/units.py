"""Numbers for people: bytes, seconds, bandwidths and counts, as text of three or four digits with a unit, and back."""

import math
import re

from .arguments import positive

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}


def figures(value: float, digits: int = 3) -> str:
    """`0.05` for 0.0499992 and `12300` for 12345: significant digits, never an exponent."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    text = f"{round(value, places):.{max(0, places)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def size(nbytes: float) -> str:
    """`773.5 KiB`."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{figures(nbytes / factor, 4)} {unit}"
    return f"{nbytes:.0f} B"


def mib(value: float | str) -> str:
    """A bucket size in MiB as an argument: `2.5`, and "auto" in quotes."""
    return f'"{value}"' if isinstance(value, str) else figures(value, 4)


def duration(seconds: float | None) -> str:
    """`1.25 ms`; a dash for what is not known."""
    if seconds is None:
        return "–"
    seconds = float(f"{seconds:.3g}")
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= factor:
            return f"{figures(seconds / factor)} {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds else "0"


def rate(bytes_per_second: float) -> str:
    """`100 Gbit/s`."""
    bits = bytes_per_second * 8
    for unit, factor in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= factor:
            return f"{figures(bits / factor, 4)} {unit}"
    return f"{figures(bits, 4)} bit/s"


def count(number: int, what: str) -> str:
    """`1 bucket`, `2 buckets`."""
    return f"{number} {what}{'s' * (number != 1)}"


def share(part: float | None) -> str:
    """`12%`; a dash for what is not known."""
    return "–" if part is None else f"{part:.0%}"


def bandwidth(value: float | str, what: str = "bandwidth") -> float:
    """Bytes per second from `100Gbit/s`, `12.5 GB/s`, `12GiB/s`, or a number of bytes per second.

    Raises:
        ValueError: it is none of these, or not positive.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([\d.]+(?:e[+-]?\d+)?)\s*([kmgt]?i?)(bit|bits|b|B)(?:/s|ps)\s*", value, re.IGNORECASE)
        if match is None or match[2].lower() not in _PREFIXES:
            raise ValueError(f"{what} must be like 100Gbit/s or 12.5GB/s, got {value!r}")
        bits = match[3].lower().startswith("bit") or match[3] == "b"
        value = _number(what, match[1]) * _PREFIXES[match[2].lower()] / (8 if bits else 1)
    positive(what, value)
    return float(value)


def seconds(value: float | str) -> float:
    """Seconds from `5us`, `1.5 ms`, or a number of seconds.

    Raises:
        ValueError: it is none of these, or negative.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([\d.]+(?:e[+-]?\d+)?)\s*(s|ms|us|µs|μs|ns)\s*", value)
        if match is None:
            raise ValueError(f"latency must be like 5us or 0.1ms, got {value!r}")
        value = _number("latency", match[1]) * _SECONDS[match[2]]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"latency must be a finite number, not negative, got {value!r}")
    return float(value)


def _number(what: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{what}: {text!r} is not a number") from None
