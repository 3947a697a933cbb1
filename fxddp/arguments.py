"""What is refused of arguments."""

import math


def whole(name: str, value: object, *, least: int, multiple: int = 1) -> None:
    """Refuses an argument that is no such number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or value % multiple:
        kind = f"multiple of {multiple}" if multiple > 1 else "whole number"
        raise ValueError(f"{name} must be a {kind}, at least {least}, got {value!r}")


def positive(name: str, value: object) -> None:
    """Refuses an argument that is no finite number above zero."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive, finite number, got {value!r}")


def flag(name: str, value: object) -> None:
    """Refuses an argument that is neither True nor False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
