"""What a user registered to run in the backward: what carries buckets in place of the all-reduce, and an optimizer."""

from typing import TYPE_CHECKING

from torch.optim import Optimizer

from . import _compat
from .comm_hook import CommHook
from .optimizer import OptimizerInBackward
from .sending import SUMMED, Carrier

if TYPE_CHECKING:
    from .config import Settings
    from .group import Group
    from .uncovered import Watch


class Registered:
    """What is registered with a backend, by its settings or later; ranks compare it before it is used.

    Attributes:
        carrier: what averages buckets.
        optimizer: what updates parameters in backward, or None.
    """

    def __init__(self, settings: "Settings") -> None:
        self.carrier: Carrier = settings.codec or SUMMED
        self.optimizer: OptimizerInBackward | None = None
        self._settings = settings
        self._confirmed: tuple[Group, tuple[str, str]] | None = None
        self._known_optimizers = (0, 0, 0)
        self._takes_over = False
        if settings.comm_hook is not None:
            self.carry_by(CommHook(None, settings.comm_hook))
        if settings.optimizer is not None:
            self.update_by(settings.optimizer)

    def carry_by(self, carrier: Carrier) -> None:
        """Has this carry the buckets; see `Backend.register_comm_hook`."""
        lanes, algorithm = self._settings.lanes, self._settings.algorithm
        if lanes or algorithm != "all_reduce":
            raise RuntimeError(
                f"{carrier.name} starts its own collectives, but this backend has {len(lanes) or 1} process group(s) "
                f"and algorithm={algorithm!r}: leave one of both out"
            )
        if self._settings.overlap is not None:
            raise RuntimeError(
                f"overlap={self._settings.overlap!r} does not go with {carrier.name}, which is settled in the "
                "backward: leave one of both out"
            )
        if self.carrier is not SUMMED:
            raise RuntimeError(
                f"{carrier.name} cannot run on the buckets too: register_comm_hook or register_builtin_comm_hook can "
                f"only be called once. This backend has {self.carrier.name} already"
            )
        self.carrier = carrier

    def update_by(self, optimizer: Optimizer) -> None:
        """Has this update its parameters; see `Backend.register_optimizer`."""
        if self.optimizer is not None:
            raise RuntimeError(
                f"this backend updates parameters with {self.optimizer.name} already: use parameter groups of one "
                "optimizer, or _apply_optimizer_in_backward, which takes several"
            )
        self.optimizer = OptimizerInBackward(optimizer, compiles=self._settings.inductor)

    def take_over_optimizers(self, watch: "Watch") -> None:
        """Updates by the optimizers that `_apply_optimizer_in_backward` gave to parameters, in place of its hooks.

        Those hooks would step with local gradients. Called when a backward begins, before they run.

        Raises:
            RuntimeError: this backend has another optimizer.
        """
        known = (*_compat.optimizers_of_parameters(), len(watch))
        if known == self._known_optimizers or known[0] == 0:
            return
        having = list(filter(_compat.has_optimizer, watch.parameters()))
        if having and self.optimizer is not None and not self._takes_over:
            raise RuntimeError(
                f"_apply_optimizer_in_backward gave {watch.name(having[0])} an optimizer of its own, and this backend "
                f"updates parameters with {self.optimizer.name}: leave one of both out"
            )
        if having:
            self.optimizer = OptimizerInBackward(_compat.OptimizerOfEach(having), compiles=False)
            self._takes_over = True
        self._known_optimizers = (*_compat.optimizers_of_parameters(), len(watch))

    @property
    def names(self) -> tuple[str, str]:
        """The carrier and the optimizer, as ranks compare them."""
        return str(self.carrier.name), str(self.optimizer and self.optimizer.name)

    def were_confirmed(self, group: "Group") -> bool:
        """Whether all ranks compared what is there now before, or need not; from now on they did."""
        if self.carrier is SUMMED and self.optimizer is None:
            return True
        before, self._confirmed = self._confirmed, (group, self.names)
        return before == self._confirmed
