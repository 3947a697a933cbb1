"""Optimizer in backward: parameters are updated when their bucket has arrived, while other buckets still travel.

The gradient of a parameter is used where it comes to be, and freed: Jiang et al., "Optimizer Fusion: Efficient Training
with Better Locality and Parallelism", arXiv:2104.00237.

Note [update]: the end of a backward waits for the buckets in the order they were launched. A parameter whose last
contribution has arrived is updated there, and its gradient goes no further. By then all of the backward has run, so
nothing reads the old value any more; what the update hides is the communication behind it.

Between two pieces of a backward nothing is updated, even if a bucket has arrived by then. What has still to run may
read the old value: later pieces, through views of it that were saved; another graph or eager code that shares the
parameter, or uses it detached, of which autograd tells nothing before it gets there. A backward that raises, here or on
another rank, must leave the weights as they were. And an update would delay the launches that come after it, where at
the end it takes time that is spent waiting.

An update is the user's optimizer's own `step`, on a part of its parameters: the same kernels, settings read anew each
time (so that learning rate schedulers work), and one state, so that its `state_dict` is as after `step()`. Every
synchronised backward is a step: of several per iteration, or of one through another model's parameters, each updates.
What a backward gives no gradient is not updated.
"""

import functools
import inspect
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import _compat

KEPT_PARTS = 256

Settings = Sequence[Mapping[str, Any]]
"""What an optimizer's groups say besides their parameters."""

STEP_HOOKS = (
    "the optimizer in backward has hooks around its step, which runs once for each bucket there: remove them, or call "
    "optimizer.step() yourself"
)

CALL_IT_YOURSELF = "Leave it out, and call its step yourself after the backward"

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

WITHOUT_SCALER = (
    "Leave the scaler out (bfloat16 needs none), or call scaler.step(optimizer) yourself, without optimizer=…"
)

_numbers = itertools.count()
_scaled: set[int] = set()
"""Backwards of losses that a GradScaler has scaled."""

_living: "weakref.WeakSet[OptimizerInBackward]" = weakref.WeakSet()


class OptimizerInBackward:
    """Updates parameters with a user's optimizer, some at a time.

    Args:
        optimizer: over the parameters to update; others keep their gradients.
        compiles: compile the update, if the optimizer is one of torch's and has no fused kernel (`fused=True`).

    Raises:
        ValueError: it is no optimizer, or its step does more than update parameters one by one.
    """

    def __init__(self, optimizer: Optimizer, *, compiles: bool) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ValueError(
                f"optimizer must be a torch.optim.Optimizer over the parameters to update, got {optimizer!r}"
            )
        _refuse_more_than_an_update(optimizer)
        if _compat.has_step_hooks(optimizer):
            raise ValueError(STEP_HOOKS)
        self._optimizer = optimizer
        ours = type(optimizer).__module__.startswith("torch.optim")
        self._compiles = compiles and ours and not any(group.get("fused") for group in optimizer.param_groups)
        self._group_of: dict[int, int] = {}
        self._parts: dict[tuple[int, ...], _Part] = {}
        self._updated: set[int] = set()
        _guard()
        _living.add(self)

    @property
    def name(self) -> str:
        """The optimizer's class."""
        return type(self._optimizer).__qualname__

    def begin(self, task: int) -> None:
        """Called when a backward starts to update.

        Args:
            task: identifies the backward.

        Raises:
            RuntimeError: hooks were put around the optimizer's step, or the gradients are scaled.
        """
        if task in _scaled:
            raise RuntimeError(
                f"a GradScaler scaled this loss, and an optimizer in backward ({self.name}) would update with scaled "
                f"gradients, before the scaler looks at them. {WITHOUT_SCALER}"
            )
        if _compat.has_step_hooks(self._optimizer):
            raise RuntimeError(STEP_HOOKS)
        self._updated.clear()
        group_of = {id(p): i for i, group in enumerate(self._optimizer.param_groups) for p in group["params"]}
        if group_of != self._group_of:
            self._group_of = group_of
            self._parts.clear()

    def capture(self, parameters: Iterable[Tensor]) -> Callable[[Iterable[Tensor]], None]:
        """What updates these parameters later, with the settings of now; until then it counts as done."""
        self._updated.update(map(id, parameters))
        _compat.note_step(self._optimizer)
        return functools.partial(self.update, settings=_settings(self._optimizer))

    def knows(self, parameters: Iterable[Tensor]) -> bool:
        """Whether all of these are the optimizer's, as of `begin`."""
        return self._group_of.keys() >= set(map(id, parameters))

    def has_updated(self, parameter: Tensor) -> bool:
        """Whether the last backward has updated a parameter and taken its gradient."""
        return parameter.grad is None and id(parameter) in self._updated

    def update(self, parameters: Iterable[Tensor], settings: Settings | None = None) -> None:
        """Updates those of these parameters that have a gradient and that the optimizer knows; takes the gradients.

        Args:
            parameters: some of them.
            settings: of the optimizer's groups; None for what they are now.
        """
        ready = [p for p in parameters if p.grad is not None and id(p) in self._group_of]
        if not ready:
            return
        key = tuple(map(id, ready))
        part = self._parts.get(key)
        if part is None:
            if len(self._parts) >= KEPT_PARTS:  # routed models may have ever new combinations
                self._parts.clear()
            part = self._parts[key] = _Part(self._optimizer, self._group_of, ready, compiles=self._compiles)
        part.step(_settings(self._optimizer) if settings is None else settings)
        # a fused kernel itself tells autograd nothing
        if any(group.get("fused") for group in self._optimizer.param_groups):
            torch.autograd.graph.increment_version(ready)
        self._updated.update(key)
        _compat.note_step(self._optimizer)
        for parameter in ready:
            parameter.grad = None


def _refuse_more_than_an_update(optimizer: Optimizer) -> None:
    """Raises for an optimizer whose step does other things than update parameters from their gradients."""
    name = type(optimizer).__qualname__
    step = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    needed = [each.name for each in step if each.default is each.empty and each.kind not in VARIADIC]
    if needed:
        raise ValueError(
            f"optimizer={name} takes {', '.join(needed)} in its step, as one does that evaluates the loss several "
            f"times: it cannot run in backward. {CALL_IT_YOURSELF}"
        )
    if inside := _optimizers_in(optimizer):
        raise ValueError(
            f"optimizer={name} holds another optimizer ({type(inside[0]).__qualname__}): its step does more than "
            f"update parameters, such as communicate, and would do it once for each bucket. {CALL_IT_YOURSELF}"
        )


def _optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    found = []
    for value in vars(optimizer).values():
        several = value.values() if isinstance(value, Mapping) else value
        members = several if isinstance(value, (list, tuple, Mapping)) else [value]
        found += [each for each in members if isinstance(each, Optimizer) and each is not optimizer]
    return found


def _settings(optimizer: Optimizer) -> Settings:
    """Of each group; rates that are tensors are copied, as they may be changed in place."""
    return [
        {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


class _Part:
    """The optimizer for some of its parameters."""

    def __init__(
        self, optimizer: Optimizer, group_of: dict[int, int], parameters: Sequence[Tensor], *, compiles: bool
    ) -> None:
        self._whole = optimizer
        self._groups = sorted({group_of[id(p)] for p in parameters})
        members: dict[int, list[Tensor]] = {i: [] for i in self._groups}
        for parameter in parameters:
            members[group_of[id(parameter)]].append(parameter)
        self._part = _compat.part_of(optimizer, [{"params": members[i]} for i in self._groups])
        self._rates: list[Tensor | None] = [None] * len(self._groups)
        self._compiled = _compat.step_to_compile(self._part, f"update_{next(_numbers)}") if compiles else None
        self._fixed: Any = None
        self._state: Any = None

    def step(self, settings: Settings) -> None:
        """Updates the parameters from their gradients, with these settings of the optimizer's groups."""
        settings = [dict(settings[i]) for i in self._groups]
        if self._compiled is not None:
            fixed = [{**each, "lr": None} for each in settings]
            if self._fixed is not None and fixed != self._fixed:  # a momentum schedule: compiled anew in every step
                self._compiled = None
            self._fixed = fixed
        for mine, theirs in zip(self._part.param_groups, settings, strict=True):
            mine.update(theirs)
        if self._compiled is None:
            self._part.state = self._whole.state
            self._part.step()
        elif (
            self._state is not self._whole.state
        ):  # the first time, and after `load_state_dict`: state comes into being
            self._state = self._part.state = self._whole.state
            self._part.step()
            members = [p for group in self._part.param_groups for p in group["params"] if p in self._state]
            self._part.state = defaultdict(dict, {p: self._state[p] for p in members})
        else:
            self._run(self._compiled)

    @torch.no_grad()
    def _run(self, compiled: Callable[[], None]) -> None:
        for i, group in enumerate(self._part.param_groups):
            rate = self._rates[i]
            if rate is None:
                rate = self._rates[i] = torch.empty((), dtype=torch.float64)
            rate.fill_(group["lr"])
            group["lr"] = rate  # a number would be compiled in
        compiled()


def optimizer_over(optim: type[Optimizer], parameters: Iterable[nn.Parameter], *args: Any, **kwargs: Any) -> Optimizer:
    """What `_register_fused_optim` is asked for.

    Raises:
        ValueError: `optim` is no optimizer class.
    """
    if not (isinstance(optim, type) and issubclass(optim, Optimizer)):
        raise ValueError(f"optim must be a class of torch.optim's optimizers, got {optim!r}")
    return optim(list(parameters), *args, **kwargs)


@functools.cache
def _guard() -> None:
    _compat.before_clipping(torch.compiler.disable(_refuse_clipping))  # not once and for all, when that is compiled
    _compat.before_unscaling(torch.compiler.disable(_refuse_unscaling))
    _compat.when_scaled(_note_scaled)


def _note_scaled() -> None:
    if len(_scaled) >= KEPT_PARTS:
        _scaled.clear()
    _scaled.add(_compat.task_id())


def _refuse_clipping(parameters: Iterable[Tensor]) -> None:
    if found := _updated(parameters):
        raise RuntimeError(
            f"gradients are to be clipped, but {found}: there is nothing left to clip. Clip without optimizer=…, and "
            "call optimizer.step() yourself"
        )


def _refuse_unscaling(parameters: Iterable[Tensor]) -> None:
    if found := _updated(parameters):
        raise RuntimeError(
            f"a GradScaler is to unscale gradients, but {found}: with whatever scale they had. {WITHOUT_SCALER}"
        )


def _updated(parameters: Iterable[Tensor]) -> str:
    """Says how many of these have been updated by the last backward; "" for none."""
    gone = [tuple(p.shape) for p in parameters if any(optimizer.has_updated(p) for optimizer in _living)]
    if not gone:
        return ""
    return (
        f"the last backward has updated {len(gone)} of these parameters already (the first of shape {gone[0]}) and "
        "taken their gradients, with an optimizer in backward"
    )
