"""Matrix products that write gradients to their places in a bucket, scaled, instead of being scaled and copied there.

Before, for a weight whose gradient is a product:        After:

    grad = mm(a, b)                                          part = scaled_mm(a, b, scale)
    part = reshape(grad * scale)                             flat = cat([part, …])
    flat = cat([part, …])

`scaled_mm` gives the product as a flat tensor, so that an inner compiler can have it computed right in its slice of
`flat`: one pass over the gradient and one copy of it less. The factor multiplies the sums inside of the product, which
is exact for powers of two; otherwise it rounds once, where a product and a multiplication round twice. Small products
are left alone: there, calling an operator of ours costs more than the copy.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry, register_flop_formula

from .allreduce import SCALE_META, caller, fake_mode

aten = torch.ops.aten

WORTHWHILE = 1 << 16
"""Bytes of a gradient from which on this pays: about 5 us of calls against reading and writing it once more."""

PRODUCT_META = "fxddp_product"
"""The gradient, as it was returned before, that a product gives the scaled values of."""

_VIEWS = (aten.permute.default, aten.t.default, aten.transpose.int, aten.reshape.default, aten.view.default)

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


def take_products(gm: fx.GraphModule, *, worthwhile: int = WORTHWHILE) -> fx.GraphModule:
    """Rewrites the packing of gradients that are matrix products.

    Args:
        gm: a backward graph after `insert_allreduce`; edited in place.
        worthwhile: bytes of the smallest gradient for which to do it.

    Returns:
        `gm`.
    """
    graph = gm.graph
    call = caller(graph, fake_mode(graph))
    factors = [node for node in graph.find_nodes(op="placeholder") if SCALE_META in node.meta]
    for scaled in [user for factor in factors for user in factor.users if user.target is aten.mul.Tensor]:
        found = _find(scaled, worthwhile)
        if found is None:
            continue
        chain, transposed = found
        product, part = chain[0], chain[-1]
        a, b = product.args
        with graph.inserting_before(product):
            if transposed:
                a, b = (call(aten.permute.default, each, [1, 0]) for each in (b, a))
            new = call(SCALED_MM, a, b, scaled.args[1])
        new.meta = {**product.meta, "val": new.meta["val"], PRODUCT_META: scaled.args[0]}
        part.replace_all_uses_with(new)
        for node in reversed(chain):
            graph.erase_node(node)
    graph.lint()
    gm.recompile()
    return gm


def _find(scaled: fx.Node, worthwhile: int) -> tuple[list[fx.Node], bool] | None:
    """What `scaled_mm` replaces around the multiplication of a gradient with the factor.

    Returns:
        The nodes from the matrix product to the flat part, and whether the flat part is the transposed product's; None
        if there is no product, something else reads a value on the way, or the product is small.
    """
    chain: list[Any] = [scaled]
    while chain[0].target in (*_VIEWS, aten.mul.Tensor):
        chain.insert(0, chain[0].args[0])
    while len(chain[-1].users) == 1 and (user := next(iter(chain[-1].users))).target in _VIEWS:
        chain.append(user)
    product, part = chain[0], chain[-1]
    value = product.meta.get("val")
    if product.target is not aten.mm.default or any(len(node.users) != 1 for node in chain[:-1]):
        return None
    if value.numel() * value.dtype.itemsize < worthwhile or not value.dtype.is_floating_point:
        return None
    if part.meta["val"].dtype is not value.dtype or part.meta["val"].dim() != 1:
        return None
    rows, columns = value.shape
    for transposed, strides in ((False, (columns, 1)), (True, (1, rows))):
        tensor = torch.empty_strided((rows, columns), strides, dtype=value.dtype, device="meta")
        seen = _seen_through(chain[1:], tensor)
        if seen is not None:
            return chain, transposed
    return None


def _seen_through(chain: list[Any], tensor: Tensor) -> Tensor | None:
    """A tensor as the nodes of this chain show it, if they all can without copying."""
    for node in chain:
        if node.target in (aten.reshape.default, aten.view.default):
            try:
                tensor = tensor.view(*node.args[1:])
            except RuntimeError:
                return None
        elif node.target is not aten.mul.Tensor:
            tensor = node.target(tensor, *node.args[1:])
    return tensor
