"""fxddp: data-parallel training for `torch.compile`, as passes over the AOTAutograd backward graph.

model = torch.compile(model, backend=fxddp.backend(bucket_mb=25))
"""

from .adaptive import Adaptive
from .backend import Backend, backend, backend_of, no_sync
from .channel import RanksDisagree
from .ddp import DistributedDataParallel
from .explain import Explanation, explain
from .int8 import Int8
from .powersgd import PowerSGD
from .stats import BackwardRecord, Stats

__version__ = "0.1.0"
__all__ = [
    "Adaptive",
    "Backend",
    "BackwardRecord",
    "DistributedDataParallel",
    "Explanation",
    "Int8",
    "PowerSGD",
    "RanksDisagree",
    "Stats",
    "backend",
    "backend_of",
    "explain",
    "no_sync",
]
