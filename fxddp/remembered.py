"""What a codec remembers of each parameter between steps, and what one iteration changes of it.

A codec gets buckets of any parameters: what is packed together may change from one step to the next. So everything it
remembers belongs to a parameter, and is saved under the parameter's qualified name.

Note [one iteration]: what a codec learns from a bucket counts when the iteration is over, its backward and those inside
it, as weights are then about to change. A backward that raises leaves no trace, and so does a parameter that no rank
has a gradient of. The one thing that later buckets of the same iteration see is the error that an earlier one left of
the same parameter.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

ERROR = "error"
"""What a rank has not sent of a parameter's gradients so far: its own."""


class Memory:
    """What a codec keeps for each parameter, by name of the thing; forgotten with the parameter.

    Parameters of one name, as of blocks of one class that are compiled one by one, are numbered in the order in which
    they first travel: "weight", "weight (2)", ….
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[Tensor], str, dict[str, Any]]] = {}
        self._loaded: dict[str, dict[str, Any]] = {}

    def of(self, parameter: Tensor, name: Callable[[Tensor], str]) -> dict[str, Any]:
        """What is kept for a parameter; what was loaded for it, if it is met for the first time.

        Raises:
            RuntimeError: that is of another shape.
        """
        identity = id(parameter)
        if identity not in self._kept:
            kept = self._kept

            def forget(_: object) -> None:
                kept.pop(identity, None)

            taken = {full for _, full, _ in kept.values()}
            plain_name = full = name(parameter)
            number = 1
            while full in taken:
                number += 1
                full = f"{plain_name} ({number})"
            found = _like(parameter, full, self._loaded.pop(full, {}))
            kept[identity] = (weakref.ref(parameter, forget), full, found)
        return self._kept[identity][2]

    def items(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Everything, by name."""
        yield from ((name, found) for _, name, found in self._kept.values())
        yield from self._loaded.items()

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Forgets everything and keeps this for when the parameters are met."""
        self._kept.clear()
        self._loaded = {name: dict(values) for name, values in state.items()}


def _like(parameter: Tensor, name: str, values: dict[str, Any]) -> dict[str, Any]:
    error = values.get(ERROR)
    if error is not None and error.shape != parameter.shape:
        raise RuntimeError(
            f"the loaded codec state of {name} is of shape {tuple(error.shape)}, the parameter of "
            f"{tuple(parameter.shape)}: it was saved for another model"
        )
    return {key: value.to(parameter.device) if isinstance(value, Tensor) else value for key, value in values.items()}


class Session:
    """What one iteration changes of a codec's memory; see Note [one iteration]."""

    def __init__(self, memory: Memory, name: Callable[[Tensor], str]) -> None:
        """Opens one.

        Args:
            memory: the codec's.
            name: gives a parameter's qualified name, the same on all ranks.
        """
        self.name = name
        self._memory = memory
        self._errors: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._changes: list[tuple[Tensor, str, Any]] = []

    def read(self, parameter: Tensor) -> dict[str, Any]:
        """What was known of a parameter when this iteration began."""
        return self._memory.of(parameter, self.name)

    def error(self, parameter: Tensor) -> Tensor | None:
        """What was not sent of a parameter's gradients so far."""
        if id(parameter) in self._errors:
            return self._errors[id(parameter)][1]
        return self.read(parameter).get(ERROR)

    def set_error(self, parameter: Tensor, error: Tensor | None) -> None:
        """Replaces that."""
        self._errors[id(parameter)] = (parameter, error)

    def change(self, parameter: Tensor, key: str, value: Any) -> None:
        """Has something kept when the iteration is over."""
        self._changes.append((parameter, key, value))

    def commit(self) -> None:
        """The iteration is over."""
        self._changes += [(parameter, ERROR, error) for parameter, error in self._errors.values()]
        for parameter, key, value in self._changes:
            self.read(parameter)[key] = value
        self._changes.clear()
        self._errors.clear()
