"""All parameters and modules alive in this process, including what `gc.freeze` hides."""

import gc
import weakref
from collections.abc import Sequence
from itertools import compress
from typing import Any

from torch import nn


class _Mark:
    """Listed by the garbage collector unless it is frozen."""


_hidden: list[weakref.ref[Any]] = []
_before: _Mark | None = None  # frozen with those that are hidden
_after: _Mark | None = None  # made when it was last looked what is frozen


def living() -> tuple[list[nn.Parameter], list[nn.Module]]:
    """All parameters and all modules alive in this process.

    The garbage collector does not list what is frozen, and freezes all or nothing. So the first call, and the first
    after each `gc.freeze`, lists everything and freezes it again: what was made since then is frozen with it, save
    garbage. Other calls do not ask how much is frozen, as that is counted object by object.
    """
    objects = gc.get_objects()
    marks = _instances(objects, _Mark)
    if _after not in marks:
        del objects  # it keeps garbage alive
        _look_at_frozen()
        objects = gc.get_objects()
    elif _before in marks:  # thawed
        _hidden.clear()
    objects += [found for reference in _hidden if (found := reference()) is not None]
    return _instances(objects, nn.Parameter), _instances(objects, nn.Module)


def _look_at_frozen() -> None:
    global _before, _after  # noqa: PLW0603 (what is frozen is the process's)
    _hidden.clear()
    if gc.get_freeze_count():
        gc.collect()
        gc.unfreeze()
        objects = gc.get_objects()
        _hidden[:] = map(weakref.ref, (*_instances(objects, nn.Parameter), *_instances(objects, nn.Module)))
        _before = _Mark()
        gc.freeze()
    _after = _Mark()


def _instances(objects: Sequence[object], kind: type) -> list[Any]:
    """Those of this class or one derived from it. There may be millions of objects, so none is asked anything."""
    classes: set[type] = set()
    waiting = [kind]
    while waiting:
        one = waiting.pop()
        if one not in classes:
            classes.add(one)
            waiting += one.__subclasses__()
    return list(compress(objects, map(classes.__contains__, map(type, objects))))
