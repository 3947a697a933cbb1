"""All parameters and modules alive in this process, including what `gc.freeze` hides."""

import gc
import weakref
from collections.abc import Sequence
from itertools import compress
from typing import Any

from torch import nn


class _Mark:
    """Listed by the garbage collector for as long as nothing was frozen after it was made."""


_hidden: list[weakref.ref[Any]] = []
_mark = _Mark()


def living() -> tuple[list[nn.Parameter], list[nn.Module]]:
    """All parameters and all modules alive in this process.

    The garbage collector does not list what is frozen, and freezes all or nothing. So the first call after a
    `gc.freeze` lists everything and freezes it again: what was made since then is frozen with it, save garbage.
    """
    objects = gc.get_objects()
    if not gc.get_freeze_count():
        _hidden.clear()
    elif not _instances(objects, _Mark):
        del objects  # it keeps garbage alive
        _list_and_freeze()
        objects = gc.get_objects()
    objects += [found for reference in _hidden if (found := reference()) is not None]
    return _instances(objects, nn.Parameter), _instances(objects, nn.Module)


def _list_and_freeze() -> None:
    global _mark  # noqa: PLW0603 (what is frozen is the process's)
    gc.collect()
    gc.unfreeze()
    objects = gc.get_objects()
    _hidden[:] = map(weakref.ref, (*_instances(objects, nn.Parameter), *_instances(objects, nn.Module)))
    gc.freeze()
    _mark = _Mark()


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
