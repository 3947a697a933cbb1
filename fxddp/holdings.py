"""What parameters hold of a backward before it is over: accumulated, set aside, kept back."""

import math
from collections.abc import Sequence
from itertools import chain, repeat
from operator import attrgetter, is_

import torch
from torch import Tensor

_grad = attrgetter("grad")


class Holdings:
    """Gradients of one backward that are not on their way.

    Attributes:
        taken: what was in `.grad` and went into a bucket, by id of the parameter: put back if the backward fails.
        aside: local gradients of graphs under `no_sync`, out of sight of the hooks; `.grad` gets them at the end.
        kept: gradients that were divided already and only travel at the end.
        refilled: parameters and their `.grad`s, whose bucket was filled again in place.
        new: parameters that had no `.grad` and got one.
    """

    def __init__(self) -> None:
        self.taken: dict[int, tuple[Tensor, Tensor]] = {}
        self.aside: dict[int, tuple[Tensor, Tensor]] = {}
        self.kept: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self.refilled: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []
        self.new: list[Sequence[Tensor]] = []

    def keep(self, parameter: Tensor, scaled: Tensor) -> None:
        """Keeps a gradient, divided already, for the end of this backward."""
        self.kept.setdefault(id(parameter), (parameter, []))[1].append(scaled)

    def pop_kept(self, parameter: Tensor) -> list[Tensor]:
        """Takes what was kept of a parameter."""
        return self.kept.pop(id(parameter), (parameter, []))[1]

    def have_accumulated(self, parameters: Sequence[Tensor]) -> bool:
        """Whether some of these hold something already; not so on the usual path."""
        if not all(map(is_, map(_grad, parameters), repeat(None))):
            return True
        return bool(self.aside) and any(id(p) in self.aside for p in parameters)

    def take(self, parameter: Tensor, *, sparse: bool = False) -> Tensor | None:
        """Takes what a parameter accumulated so far, to be put back if this backward fails.

        Args:
            parameter: whose.
            sparse: it may be a sparse tensor.
        """
        identity = id(parameter)
        grad = parameter.grad
        if grad is not None and grad.layout is not torch.strided and not sparse:
            grad = grad.to_dense()
        kept = self.aside.pop(identity, (parameter, None))[1]
        if kept is not None and grad is not None:
            kept.add_(grad)
        old = grad if kept is None else kept
        if old is not None:
            parameter.grad = None
            self.taken.setdefault(identity, (parameter, old))
        return old

    def set_aside(self, parameter: Tensor, gradient: Tensor) -> None:
        """Accumulates a local gradient out of sight of the hooks; `.grad` gets it back at the end."""
        identity = id(parameter)
        if identity in self.aside:
            self.aside[identity][1].add_(gradient)
            return
        old = parameter.grad
        if old is not None:
            gradient = old.add_(gradient)
            parameter.grad = None
        self.aside[identity] = (parameter, gradient)

    def refills(self, parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Takes `.grad`s whose bucket was filled again in place, and travels."""
        self.refilled.append((parameters, grads))
        for parameter in parameters:
            parameter.grad = None

    def show(self) -> list[Tensor]:
        """Puts what was set aside into `.grad`; the parameters."""
        for parameter, gradient in self.aside.values():
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        shown = [parameter for parameter, _ in self.aside.values()]
        self.aside.clear()
        return shown

    def lay_back(self) -> list[Tensor]:
        """The backward is over: what was set aside goes to `.grad`; the parameters."""
        laid = self.show()
        self.taken.clear()
        self.refilled.clear()
        self.new.clear()
        return laid

    def put_back(self) -> None:
        """The backward failed: every `.grad` is what it was, with what autograd accumulated since.

        What was filled again in place is lost, and NaN says so; in new memory, as the bucket may still be under way.
        """
        for parameter in chain.from_iterable(self.new):
            parameter.grad = None
        for parameter, grad in chain.from_iterable(zip(*pair, strict=True) for pair in self.refilled):
            self.taken.setdefault(id(parameter), (parameter, torch.full_like(grad, math.nan)))
        for parameter, old in [*self.taken.values(), *self.aside.values()]:
            parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)
        self.taken.clear()
        self.aside.clear()
        self.kept.clear()
        self.refilled.clear()
        self.new.clear()
