"""Narrows what travels: each bucket is cast to a narrower dtype for its way over the network.

Before:                                    After, for `wire=torch.float16`:

    flat = cat([a, b])                         flat = cat([a, b])
    sent = all_reduce(flat)                    wire = cat([convert_element_type(a, float16), …])
    done = wait_tensor(sent)                   sent = all_reduce(wire)
    output: as_strided(done, …)                done = wait_tensor(sent)
                                               back = convert_element_type(done, float32)
                                               output: as_strided(back, …)

The packed values are divided already, so a sum of float16 overflows no sooner than an average would. Each gradient is
cast by itself: by the loop that packs it, where a cast of the whole bucket would read it once more. Afterwards the
bucket exists twice until it left: `split` hands out both, so that whoever runs the pieces can keep the exact local
gradients. In the whole graph nothing reads `flat`, and the inner compiler drops it. Buckets that
would not become smaller are left as they are: those of the wire's own width or narrower, and complex ones.
"""

from typing import Any

import torch
from torch import fx

from .allreduce import STAGE_META, caller, fake_mode, is_send, is_wait

CAT = torch.ops.aten.cat.default
CONVERT = torch.ops.prims.convert_element_type.default

WIRE_META = "fxddp_wire"


def narrows(dtype: torch.dtype, wire: torch.dtype | None) -> bool:
    """Whether a bucket of `dtype` is cast to `wire` for travelling."""
    return wire is not None and dtype.is_floating_point and dtype.itemsize > wire.itemsize


def packed_bucket(send: fx.Node) -> tuple[Any, Any]:
    """The flat bucket behind a first collective, in its own dtype, and the one that is cast for travelling or None."""
    sent: Any = send.args[0]
    while STAGE_META in sent.meta:  # evened out for its first step
        sent = sent.args[0]
    if WIRE_META not in sent.meta:
        return sent, None
    if sent.target is CONVERT:
        return sent.args[0], sent
    parts = [part.args[0] for part in sent.args[0]]
    return next(node for node in parts[0].users if node.target is CAT and list(node.args[0]) == parts), sent


def reduced_by(done: Any) -> Any:
    """The wait that a reduced bucket comes from, through its cast back."""
    return done.args[0] if WIRE_META in done.meta else done


def compress(gm: fx.GraphModule, *, wire: torch.dtype | None) -> fx.GraphModule:
    """Puts casts around each all-reduce of a bucket that is wider than `wire`.

    Args:
        gm: a backward graph after `insert_allreduce`; edited in place.
        wire: a floating dtype; None leaves `gm` untouched.

    Returns:
        `gm`.
    """
    graph = gm.graph
    sends = [node for node in graph.nodes if is_send(node) and narrows(node.args[0].meta["val"].dtype, wire)]
    if not sends:
        return gm
    call = caller(graph, fake_mode(graph))
    for send in sends:
        flat: Any = send.args[0]
        (done,) = (user for user in send.users if is_wait(user))
        with graph.inserting_before(send):
            if flat.target is CAT:
                small = call(CAT, [call(CONVERT, part, wire) for part in flat.args[0]])
            else:
                small = call(CONVERT, flat, wire)
        small.meta[WIRE_META] = wire
        send.args = (small, *send.args[1:])
        for node in (send, done):
            node.meta["val"] = small.meta["val"]
        with graph.inserting_before(done.next):
            back = call(CONVERT, done, flat.meta["val"].dtype)
        back.meta[WIRE_META] = wire
        done.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)
    graph.lint()
    gm.recompile()
    return gm
