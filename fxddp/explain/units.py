"""Numbers for people: bytes, seconds and bandwidths, as text and back."""

import math
import re

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}


def size(nbytes: float) -> str:
    """`773.5 KiB`."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {unit}"
    return f"{nbytes:.0f} B"


def number(value: float | str) -> str:
    """`2.5`, and "auto" in quotes."""
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"


def duration(seconds: float | None) -> str:
    """`1.25 ms`; a dash for what is not known."""
    if seconds is None:
        return "–"
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds else "0"


def rate(bytes_per_second: float) -> str:
    """`100 Gbit/s`."""
    bits = bytes_per_second * 8
    for unit, factor in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= factor:
            return f"{bits / factor:.4g} {unit}"
    return f"{bits:.4g} bit/s"


def bandwidth(value: float | str) -> float:
    """Bytes per second from `100Gbit/s`, `12.5 GB/s`, `12GiB/s`, or a number of bytes per second.

    Raises:
        ValueError: it is none of these, or not positive.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([\d.]+(?:e[+-]?\d+)?)\s*([kmgt]?i?)(bit|bits|b|B)(?:/s|ps)\s*", value, re.IGNORECASE)
        if match is None or match[2].lower() not in _PREFIXES:
            raise ValueError(
                f"bandwidth must be like 100Gbit/s, 12.5GB/s or a number of bytes per second, got {value!r}"
            )
        bits = match[3].lower().startswith("bit") or match[3] == "b"
        value = _number("bandwidth", match[1]) * _PREFIXES[match[2].lower()] / (8 if bits else 1)
    return _positive("bandwidth", value)


def seconds(value: float | str) -> float:
    """Seconds from `5us`, `1.5 ms`, or a number of seconds.

    Raises:
        ValueError: it is none of these, or negative.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([\d.]+(?:e[+-]?\d+)?)\s*(s|ms|us|µs|μs|ns)\s*", value)
        if match is None:
            raise ValueError(f"latency must be like 5us, 0.1ms or a number of seconds, got {value!r}")
        value = _number("latency", match[1]) * _SECONDS[match[2]]
    return 0.0 if value == 0 else _positive("latency", value)


def _number(what: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{what}: {text!r} is not a number") from None


def _positive(what: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{what} must be a positive, finite number, got {value!r}")
    return float(value)
