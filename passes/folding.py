"""Folds the factor of a bucket into what computes a gradient, so that it needs no pass of its own over the gradient.

Before:                                                  After:

    grad = mm(a, b)                                          part = scaled_mm(a, b, scale)
    part = reshape(grad * scale)                             flat = cat([part, …])
    flat = cat([part, …])

    grad = index_put(zeros, indices, rows, accumulate)       grad = index_put(zeros, indices, rows * scale, accumulate)
    part = reshape(grad * scale)                             part = reshape(grad)

`scaled_mm` gives the product of matrices as a flat tensor, so that an inner compiler can have it computed right in its
slice of `flat`: one pass over the gradient and one copy of it less. The factor multiplies the sums inside of the
product, or what is added up to the table of an embedding: exact for powers of two, otherwise it rounds other values.
Small products are left alone: there, calling an operator of ours costs more than the copy.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry, register_flop_formula

from .allreduce import SCALE_META, caller, fake_mode

aten = torch.ops.aten

WORTHWHILE = 1 << 16
"""Bytes of a gradient from which on this pays: about 5 us of calls against reading and writing it once more."""

FOLDED_META = "fxddp_folded"
"""The gradient, as it was returned before, that a node gives the scaled values of."""

_VIEWS = (aten.permute.default, aten.t.default, aten.transpose.int, aten.reshape.default, aten.view.default)
_SCATTERS = {
    "aten.index_put.default": 2,
    "aten._unsafe_index_put.default": 2,
    "aten._unsafe_masked_index_put_accumulate.default": 3,
}
"""What puts rows into a table, and which argument the rows are."""

_library = torch.library.Library("fxddp", "DEF")
_library.define("scaled_mm(Tensor a, Tensor b, Tensor scale) -> Tensor")
_library.define("scaled_mm.out(Tensor a, Tensor b, Tensor scale, *, Tensor(a!) out) -> Tensor(a!)")


def _scaled_mm(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    return _scaled_mm_out(a, b, scale, out=a.new_empty(a.shape[0] * b.shape[1]))


def _scaled_mm_out(a: Tensor, b: Tensor, scale: Tensor, *, out: Tensor) -> Tensor:
    product = out.view(a.shape[0], b.shape[1])
    torch.addmm(product, a, b, beta=0, alpha=scale.item(), out=product)
    return out


_library.impl("scaled_mm", _scaled_mm, "CompositeExplicitAutograd")
_library.impl("scaled_mm.out", _scaled_mm_out, "CompositeExplicitAutograd")


def _scaled_mm_fake(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
    return a.new_empty(a.shape[0] * b.shape[1])


torch.library.register_fake("fxddp::scaled_mm", _scaled_mm_fake, lib=_library)
SCALED_MM = torch.ops.fxddp.scaled_mm.default
register_flop_formula(SCALED_MM.overloadpacket, get_raw=True)(flop_registry[aten.mm])


def fold_scale(gm: fx.GraphModule, *, worthwhile: int = WORTHWHILE) -> fx.GraphModule:
    """Folds the factor into matrix products, and into rows that are added up to a table.

    Args:
        gm: a backward graph after `insert_allreduce`; edited in place.
        worthwhile: bytes of the smallest gradient for which to do it.

    Returns:
        `gm`.
    """
    graph = gm.graph
    call = caller(graph, fake_mode(graph))
    changed = False
    factors = [node for node in graph.find_nodes(op="placeholder") if SCALE_META in node.meta]
    for scaled in [user for factor in factors for user in factor.users if user.target is aten.mul.Tensor]:
        views = _views_before(scaled)
        source: Any = (views[0] if views else scaled).args[0]
        value = source.meta["val"]
        read_elsewhere = any(len(node.users) != 1 for node in (source, *views))
        if read_elsewhere or not value.dtype.is_floating_point or value.dtype is not scaled.meta["val"].dtype:
            continue
        if value.numel() * value.dtype.itemsize < worthwhile:
            continue
        if source.target is aten.mm.default:
            changed = _fold_into_product(graph, call, source, views, scaled) or changed
        elif adds_up_rows(source):
            _fold_into_rows(graph, call, source, scaled)
            changed = True
    if changed:
        graph.lint()
        gm.recompile()
    return gm


def _views_before(node: Any) -> list[Any]:
    """The views that a node's first argument comes through, in order."""
    views: list[Any] = []
    while (node := node.args[0]).target in _VIEWS:
        views.insert(0, node)
    return views


def _views_after(node: fx.Node) -> list[Any]:
    """The views through which a value is read, and nothing else, in order."""
    views: list[Any] = []
    while len(node.users) == 1 and (user := next(iter(node.users))).target in _VIEWS:
        views.append(node := user)
    return views


def _fold_into_product(graph: fx.Graph, call: Any, product: fx.Node, before: list[Any], scaled: fx.Node) -> bool:
    """Puts `scaled_mm` in the place of a product, what is between it and the flat part of the bucket, and that.

    Returns:
        Whether it can.
    """
    after = _views_after(scaled)
    part = after[-1] if after else scaled
    transposed = _lies_transposed(product.meta["val"], [*before, *after])
    if transposed is None or part.meta["val"].dim() != 1:
        return False
    a, b = product.args
    with graph.inserting_before(product):
        if transposed:
            a, b = (call(aten.permute.default, each, [1, 0]) for each in (b, a))
        new = call(SCALED_MM, a, b, scaled.args[1])
    new.meta = {**product.meta, "val": new.meta["val"], FOLDED_META: scaled.args[0]}
    part.replace_all_uses_with(new)
    for node in reversed([product, *before, scaled, *after]):
        graph.erase_node(node)
    return True


def _lies_transposed(product: Tensor, views: list[Any]) -> bool | None:
    """Whether these views show a product's transpose, row by row, or the product itself; None if neither."""
    rows, columns = product.shape
    for transposed, strides in ((False, (columns, 1)), (True, (1, rows))):
        tensor = torch.empty_strided((rows, columns), strides, dtype=product.dtype, device="meta")
        try:
            for node in views:
                view = torch.Tensor.view if node.target is aten.reshape.default else node.target  # without a copy
                tensor = view(tensor, *node.args[1:])
        except (RuntimeError, ValueError):
            continue
        return transposed
    return None


def _viewed(node: Any) -> Any:
    """What a node is a view of, or itself."""
    while node.target in _VIEWS:
        node = node.args[0]
    return node


def adds_up_rows(node: Any) -> bool:
    """Whether a value is a table of zeros to which rows were added, or a view of it."""
    node = _viewed(node)
    if str(node.target) not in _SCATTERS:
        return False
    table: Any = node.args[0]
    accumulates = "accumulate" in str(node.target) or node.args[3:] == (True,)
    return accumulates and table.target is aten.full.default and table.args[1] == 0


def _fold_into_rows(graph: fx.Graph, call: Any, scatter: fx.Node, scaled: fx.Node) -> None:
    """Has the rows scaled that are added up, in place of their sums."""
    position = _SCATTERS[str(scatter.target)]
    with graph.inserting_before(scatter):
        rows = call(aten.mul.Tensor, scatter.args[position], scaled.args[1])
    scatter.args = (*scatter.args[:position], rows, *scatter.args[position + 1 :])
    gradient: Any = scaled.args[0]
    gradient.meta[FOLDED_META] = gradient
    scaled.replace_all_uses_with(gradient)
    graph.erase_node(scaled)


def folded(part: Any) -> Any:
    """The gradient of which a part of a bucket gives scaled values; None if what computes it does not scale it."""
    gradient = part.meta.get(FOLDED_META)
    part = _viewed(part)
    rows = _SCATTERS.get(str(part.target))
    scaled = part if rows is None else part.args[rows]
    factor = scaled.args[-1] if scaled.target in (SCALED_MM, aten.mul.Tensor) else None
    return gradient if isinstance(factor, fx.Node) and SCALE_META in factor.meta else None
