"""Two operators for a model of many parameters, opaque to compilers: rows made one tensor, and one tensor made rows.

Inductor makes a loop of each tensor that `torch.stack` takes, and of 10,000 it would compile little else. What a step
costs per parameter, which is what such a model is for, needs none of these loops.
"""

import torch
from torch import Tensor

torch.library.define("fxddp_benchmarks::stack", "(Tensor[] rows) -> Tensor")
torch.library.define("fxddp_benchmarks::unstack", "(Tensor stacked) -> Tensor[]")
torch.library.impl("fxddp_benchmarks::stack", "CPU", torch.stack)
torch.library.impl("fxddp_benchmarks::unstack", "CPU", torch.unbind_copy)


@torch.library.register_fake("fxddp_benchmarks::stack")
def _stacked(rows: list[Tensor]) -> Tensor:
    return rows[0].new_empty(len(rows), *rows[0].shape)


@torch.library.register_fake("fxddp_benchmarks::unstack")
def _unstacked(stacked: Tensor) -> list[Tensor]:
    return [stacked.new_empty(stacked.shape[1:]) for _ in range(len(stacked))]


stack = torch.ops.fxddp_benchmarks.stack
torch.library.register_autograd(
    "fxddp_benchmarks::stack", lambda _, gradient: torch.ops.fxddp_benchmarks.unstack(gradient)
)
