"""One forward through a compiled graph: which parameters it used, and whether its backward will synchronise.

Note [identity]: parameters are inputs of a compiled graph, and one graph serves every module of a class. A `Binding` is
the set of parameters a graph was called with; a `Call` is one forward. The call travels to its backward on the autograd
node of its results, as a pre-hook, which runs right before the compiled backward and sees which outputs got a gradient.
"""

import warnings
import weakref
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import _compat, executor, next_forward
from .coverage import Coverage, coverage_of
from .decision import GRAPH, Event
from .group import Group
from .passes.plan import BucketPlan
from .passes.split import Program
from .uncovered import parameters_registered

if TYPE_CHECKING:
    from .backend import Backend


def getter(positions: Sequence[int]) -> Any:
    """A function that picks these positions of a sequence, as a tuple, in C."""
    if len(positions) == 1:
        (only,) = positions
        return lambda values: (values[only],)
    return itemgetter(*positions) if positions else lambda values: ()


class Binding:
    """The parameters that one compiled graph is called with, remembered without keeping them alive.

    Attributes:
        ids, names: of the parameters, in the order of the graph's inputs.
        repeated: ids of those that stand at several inputs: weights that were tied after the graph was compiled.
        foreign: some do not get their gradient the usual way.
        group: whose ranks they have met.
        explored: what was registered when parameters nobody told us about were last looked for.
        coverage: of the parameters whose gradients the graph packs; None before its first backward was in sight.
    """

    def __init__(self, positions: tuple[int, ...], parameters: Sequence[Tensor], names: Sequence[str]) -> None:
        self.ids = tuple(map(id, parameters))
        self.names = tuple(names)
        self.repeated = frozenset(i for i, times in Counter(self.ids).items() if times > 1)
        self.foreign = bool(self.repeated) or any(not isinstance(p, nn.Parameter) or not p.is_leaf for p in parameters)
        self.group: Group | None = None
        self.explored = -1
        self.coverage: Coverage | None = None
        self._slot = {position: i for i, position in enumerate(positions)}
        self._plan: BucketPlan | None = None
        self._getters: list[Any] = []
        self._events: dict[Any, tuple[BucketPlan, Event]] = {}
        self._events_of: Group | None = None

    @property
    def unexplored(self) -> bool:
        """Whether backwards of these parameters may hold others that nobody told us about."""
        return self.explored != parameters_registered()

    def cover(self, call: "Call", plan: BucketPlan | None, node: Any) -> None:
        """A forward ran, whose backward will execute this node and pack buckets by this plan."""
        if self.coverage is None:
            packed = () if plan is None else chain.from_iterable(self.by_bucket(plan, call.parameters))
            self.coverage = coverage_of(packed, call.backend)
        self.coverage.expect(node)

    def uncover(self) -> None:
        """A backward takes another than the usual way through the graph."""
        if self.coverage is not None:
            self.coverage.end()

    @property
    def bare(self) -> bool:
        """Whether the parameters whose gradients the graph packs have no hooks."""
        return self.coverage is not None and self.coverage.bare

    def by_bucket(self, plan: BucketPlan, parameters: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """The parameters of each bucket of a plan."""
        if self._plan is not plan:
            self._getters = [getter([self._slot[grad.input] for grad in bucket.grads]) for bucket in plan.buckets]
            self._plan = plan
        return [pick(parameters) for pick in self._getters]

    def event(self, call: "Call", program: Program, exceptions: "executor.Exceptions") -> Event:
        """What this rank announces when a backward with this plan starts; kept, as it is the same in every step."""
        if self._events_of is not call.group:
            self._events.clear()
            self._events_of = call.group
        plan = program.plan
        in_rows = call.backend.sends_rows
        key = (id(plan), in_rows, *map(frozenset, (exceptions.dropped, exceptions.local, exceptions.reduced)))
        if key not in self._events:
            number, owner = call.backend.replica.number, call.backend.replica.owner(call.group)
            buckets = tuple(tuple(map(number, members)) for members in self.by_bucket(plan, call.parameters))
            inside = [step.collectives for step in program.steps]
            details = inside if any(inside) else None  # the model's own collectives must stay in step with ours
            unused, hooked, waiting = (
                tuple(sorted(buckets[index][i] for index, i in wheres))
                for wheres in (exceptions.dropped, exceptions.local, exceptions.reduced)
            )
            tables = tuple(buckets[table.bucket][table.position] for table in program.tables) if in_rows else ()
            event = Event(GRAPH, buckets, unused, hooked, waiting, details, owner, order=program.order, tables=tables)
            self._events[key] = (plan, event)
        return self._events[key][1]


class Bindings:
    """The bindings of one graph; a binding is forgotten when one of its parameters dies."""

    def __init__(self, positions: tuple[int, ...]) -> None:
        self._positions = positions
        self._pick = getter(positions)
        self._known: dict[tuple[int, ...], Binding] = {}
        self._watched: dict[tuple[int, ...], list[weakref.ref[Tensor]]] = {}

    def pick(self, arguments: Sequence[Any]) -> tuple[Tensor, ...]:
        """The parameters among a graph's arguments."""
        return self._pick(arguments)  # type: ignore[no-any-return]

    def get(self, parameters: tuple[Tensor, ...]) -> Binding | None:
        """The binding of these parameters, if they were seen before."""
        return self._known.get(tuple(map(id, parameters)))

    def add(self, parameters: tuple[Tensor, ...], names: Sequence[str]) -> Binding:
        """Remembers new parameters."""
        binding = Binding(self._positions, parameters, names)
        self._known[binding.ids] = binding

        def forget(_: Any, ids: tuple[int, ...] = binding.ids) -> None:
            self._known.pop(ids, None)
            self._watched.pop(ids, None)

        self._watched[binding.ids] = [weakref.ref(p, forget) for p in parameters]
        return binding


class Call:
    """One forward of one graph, as its backward finds it."""

    __slots__ = ("backend", "binding", "creates_graph", "graph", "group", "parameters", "sync", "undefined")

    def __init__(
        self,
        backend: "Backend",
        binding: Binding,
        parameters: tuple[Tensor, ...],
        group: Group,
        *,
        sync: bool,
        graph: int,
    ) -> None:
        self.backend = backend
        self.binding = binding
        self.parameters = parameters
        self.group = group
        self.sync = sync
        self.graph = graph
        self.undefined: frozenset[int] = frozenset()
        self.creates_graph = False

    def mark(self, node: Any, plan: BucketPlan | None) -> None:
        """Has this call announced by the node of the forward's results, which will run its backward, by this plan."""
        node.register_prehook(self)
        self.binding.cover(self, plan, node)

    def parameters_by_bucket(self, plan: BucketPlan) -> list[tuple[Tensor, ...]]:
        """The parameters of each bucket of a plan."""
        return self.binding.by_bucket(plan, self.parameters)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a whole training step may be compiled
    def __call__(self, gradients: Sequence[Tensor | None]) -> None:
        """Pre-hook of the autograd node: the compiled backward of this call runs next."""
        if _compat.compiled_autograd_enabled():
            raise RuntimeError(COMPILED_AUTOGRAD)
        refuse_distributed_autograd()
        next_forward.settle(self.parameters)  # before autograd looks whether what was saved is still as it was
        missing = [i for i, gradient in enumerate(gradients) if gradient is None]
        self.undefined = frozenset(missing)
        self.creates_graph = _compat.creates_graph()
        executor.announce(self)


COMPILED_AUTOGRAD = (
    "fxddp does not work with compiled autograd: it would inline the backward and run none of fxddp's all-reduces, so "
    "gradients "
    "would stay local. Turn off torch._dynamo.config.compiled_autograd; fxddp already compiles the whole backward of "
    "each graph"
)


def refuse_distributed_autograd() -> None:
    """Raises inside of a backward that would keep gradients where nobody averages them.

    And warns: that engine loses the text of an error in a hook.
    """
    if _compat.distributed_autograd():
        warnings.warn(DISTRIBUTED_AUTOGRAD, stacklevel=2)
        raise RuntimeError(DISTRIBUTED_AUTOGRAD)


DISTRIBUTED_AUTOGRAD = (
    "fxddp does not work with torch.distributed.autograd, which keeps gradients in a context of its own: they would "
    "stay local. Call loss.backward(), or use torch.nn.parallel.DistributedDataParallel for what trains through RPC"
)
