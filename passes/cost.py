"""What graphs cost to compute and buckets cost to send: expressions in the sizes of the graph, no clock, no device.

Sizes that are dynamic stay symbols: a cost is an int where every size is known and a sympy expression where not.

    work of a node      flops + bytes moved + kernels started      a sum, so that costs of nodes add up
    seconds             flops / machine.flops + bytes / machine.memory + kernels · machine.launch
    all-reduce          2 (N-1)/N · bytes / bandwidth + 2 (N-1) · latency

The last is the α–β model of the ring all-reduce: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective
communication operations in MPICH", IJHPCA 19(1), 2005, section 4.5; optimal in bandwidth by P. Patarasuk, X. Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009.

Note [fusion]: elementwise operations and reductions count as fused with what they read, as inductor does it: a value
costs memory traffic only where it leaves such a group (to a matrix product, a convolution, an output) or enters it.
"""

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from .allreduce import is_collective, is_wait
from .folding import SCALED_MM

__all__ = [
    "Machine",
    "Network",
    "Size",
    "Speeds",
    "Work",
    "graph_work",
    "node_work",
    "power_of_two",
    "rounded",
    "symbol_values",
    "valued",
]

Size: TypeAlias = "int | sympy.Expr"
"""A number that may depend on dynamic sizes."""

_FREE = ("reshape", "_unsafe_view", "detach", "alias", "view", "sym_size", "sym_stride", "sym_numel", "lift_fresh")


@dataclass(frozen=True, slots=True)
class Work:
    """Arithmetic: floating point operations, bytes read and written, kernels started."""

    flops: Size = 0
    nbytes: Size = 0
    kernels: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.nbytes + other.nbytes, self.kernels + other.kernels)

    def at(self, values: Mapping[Any, int]) -> "Work":
        """With numbers in place of the dynamic sizes."""
        return Work(valued(self.flops, values), valued(self.nbytes, values), self.kernels)


@dataclass(frozen=True, slots=True)
class Machine:
    """One rank's processor: flops per second, bytes per second of its memory, seconds to start a kernel."""

    flops: float
    memory: float
    launch: float

    def seconds(self, work: Work) -> Any:
        """How long it computes; an expression if sizes are dynamic."""
        return work.flops / self.flops + work.nbytes / self.memory + work.kernels * self.launch


@dataclass(frozen=True, slots=True)
class Network:
    """What connects the ranks.

    Attributes:
        world_size: how many there are.
        bandwidth: bytes per second that each can send.
        latency: seconds for an empty message.
        cpu_per_call: seconds that an all-reduce of nothing takes from the processor that computes; 0 if another one
            does it all.
        cpu_per_byte: seconds that each byte sent takes from it.
    """

    world_size: int
    bandwidth: float
    latency: float
    cpu_per_call: float = 0.0
    cpu_per_byte: float = 0.0

    def sent(self, nbytes: Any) -> Any:
        """Bytes that each rank sends for a ring all-reduce of this many."""
        return 2 * (self.world_size - 1) * nbytes / self.world_size

    @property
    def delay(self) -> float:
        """Seconds that an all-reduce of nothing takes: 2 (N-1) messages, one after the other."""
        return 2 * (self.world_size - 1) * self.latency

    def all_reduce(self, nbytes: Any) -> Any:
        """Seconds for a ring all-reduce of this many bytes."""
        return self.sending(nbytes) + self.delay

    def sending(self, nbytes: Any) -> Any:
        """Seconds that the bytes take, which is all but `delay`."""
        return self.sent(nbytes) / self.bandwidth

    def taken(self, nbytes: Any) -> Any:
        """Seconds that this many bytes, all-reduced, take from the processor that computes."""
        return self.cpu_per_byte * self.sent(nbytes)


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a plan is made for: the processor of a rank, and the network between them."""

    machine: Machine
    network: Network


def valued(size: Size, values: Mapping[Any, int], *, unknown: int = 1) -> int:
    """The number that a size is for these values of its symbols; symbols without a value count as `unknown`."""
    if not isinstance(size, sympy.Expr):
        return int(size)
    return int(size.subs({symbol: values.get(symbol, unknown) for symbol in size.free_symbols}))


def rounded(sizes: Mapping[Any, int]) -> dict[Any, int]:
    """Dynamic sizes as the nearest powers of two."""
    return {size: power_of_two(value) for size, value in sizes.items()}


def power_of_two(value: int) -> int:
    """The nearest one."""
    return 1 << max(0, round(math.log2(max(1, value))))


def symbol_values(gm: fx.GraphModule) -> dict[sympy.Symbol, int]:
    """The dynamic sizes of a graph and the values they had when it was traced, as far as these are known."""
    found: dict[sympy.Symbol, int] = {}
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol and size.node.hint is not None:
                found.setdefault(size.node.expr, int(size.node.hint))
    return found


def graph_work(gm: fx.GraphModule) -> Work:
    """What a whole graph costs."""
    return sum(node_work(gm).values(), Work())


def node_work(gm: fx.GraphModule) -> dict[fx.Node, Work]:
    """What each node of a graph costs, in order; collectives cost nothing here."""
    return {node: _work(node) for node in gm.graph.nodes}


def _work(node: fx.Node) -> Work:
    if _is_free(node):
        return Work()
    heavy = _formula(node) is not None
    sources = [source for source in node.all_input_nodes if _tensors(source)]
    read: Size = 0
    in_place: Size = 0
    for source in sources:
        if source.target is SCALED_MM and node.target is torch.ops.aten.cat.default:  # see folding.py
            in_place = in_place + _nbytes(source)
            continue
        base = _base(source)
        if heavy or _formula(base) is not None or base.op != "call_function":
            read = read + min(_nbytes(source), _nbytes(base), key=_rough)
    leaves = heavy or any(map(_ends_fusion, _readers(node)))
    written = _nbytes(node) - in_place if leaves else 0
    return Work(_flops(node, sources), read + written, int(leaves))


def _is_free(node: fx.Node) -> bool:
    """Whether a node only names, passes on or views what is there, or sends it."""
    target: Any = node.target
    if node.op != "call_function" or target is operator.getitem or is_collective(node) or is_wait(node):
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return _is_view(target) or not _tensors(node)


@cache
def _is_view(target: torch._ops.OpOverload) -> bool:
    returns = target._schema.returns
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return views or target._schema.name.split("::")[-1] in _FREE


def _ends_fusion(user: fx.Node) -> bool:
    return user.op == "output" or is_collective(user) or _formula(user) is not None


def _readers(node: fx.Node) -> list[fx.Node]:
    """Who uses a value, through views and elements of it."""
    found, stack = [], [node]
    while stack:
        for user in stack.pop().users:
            if user.op == "call_function" and _is_free(user) and not is_collective(user):
                stack.append(user)
            else:
                found.append(user)
    return found


def _base(node: fx.Node) -> fx.Node:
    """The value that a view, or an element of several results, belongs to."""
    while node.op == "call_function" and _is_free(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _formula(node: fx.Node) -> Any:
    """torch's own count of a node's arithmetic, if it has one."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry.get(getattr(node.target, "overloadpacket", None)) if node.op == "call_function" else None


def _flops(node: fx.Node, sources: list[fx.Node]) -> Size:
    formula = _formula(node)
    if formula is not None:
        given = _sizes if hasattr(formula, "__wrapped__") else _values  # some formulas want tensors, most their shapes
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), given)
        try:
            return _expression(formula(*args, **kwargs, out_val=given(node)))
        except (AssertionError, AttributeError, NotImplementedError, TypeError, ValueError):
            pass  # a shape that the formula does not know
    return max([_numel(node), *map(_numel, sources)], key=_rough)


def _values(node: fx.Node) -> Any:
    return node.meta.get("val")


def _sizes(node: fx.Node) -> Any:
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return tuple(_shape(item) for item in value)
    return _shape(value)


def _shape(value: Any) -> Any:
    return torch.Size(value.shape) if _is_static(value) else _symbolic(value)


def _is_static(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)


def _symbolic(value: Any) -> Any:
    return tuple(map(_expression, value.shape)) if isinstance(value, torch.Tensor) else _expression(value)


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return [item for item in values if isinstance(item, torch.Tensor)]


def _count(tensor: torch.Tensor) -> Size:
    product: Size = 1
    for size in tensor.shape:
        product = product * _expression(size)
    return product


def _numel(node: fx.Node) -> Size:
    total: Size = 0
    for tensor in _tensors(node):
        total = total + _count(tensor)
    return total


def _nbytes(node: fx.Node) -> Size:
    total: Size = 0
    for tensor in _tensors(node):
        total = total + _count(tensor) * tensor.dtype.itemsize
    return total


def _rough(size: Size) -> int:
    """For comparing sizes: a dynamic one counts as large."""
    return valued(size, {}, unknown=64)
