"""Modules: what all of them share."""

from typing import Any

from torch.nn.modules import module


def hooks_of_all_modules() -> list[dict[int, Any]]:
    """Where torch keeps the hooks that every module calls."""
    return [
        module._global_forward_hooks,
        module._global_forward_pre_hooks,
        module._global_backward_hooks,
        module._global_backward_pre_hooks,
    ]
