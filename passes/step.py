"""How long a step takes: the model in which `bucket_mb="auto"` compares plans (`sizing.py`).

Gradient k is ready r[k] seconds after the backward began, which computes for T seconds; a bucket of B bytes is launched
with its last gradient and takes α + βB on a network that sends one bucket after the other (α is `Network.delay`, β the
time of a byte in `Network.all_reduce`). The step is over when both are done.

Note [one processor]
~~~~~~~~~~~~~~~~~~~~
On a CPU without a core to spare, what sends takes its time from what computes: c seconds for each byte, of which at
most b are sent in a second. Of the B bytes that are sent for what is ready before gradient k, from r[0] on, those that
can have been sent delay it:

    r'[k] = r[k] + min(c·B, f/(1 − f)·(r[k] − r[0])), f = min(1/2, b·c)

where the half is what a fair scheduler leaves. What is left of c·S, S being all bytes that are sent, then delays what
follows the last one. What a plan is worth (`Step.end`) counts the bytes of the buckets launched before.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from .cost import Network

__all__ = ["Step"]


@dataclass(frozen=True, slots=True)
class Step:
    """A backward and the network that its gradients are sent on.

    Attributes:
        first_ready: seconds of the backward until the first gradient is.
        total: seconds of the backward.
        network: what sends them.
    """

    first_ready: float
    total: float
    network: Network

    def end(self, launches: Iterable[tuple[float, float]], scale: float = 1.0) -> float:
        """Seconds after which backward and sending are over.

        Args:
            launches: of each bucket when it is ready, in seconds of the backward, and how many bytes travel; in order.
            scale: how many times as long computation takes as predicted.
        """
        free, taken, lag, ready = 0.0, 0.0, 0.0, 0.0
        for ready, nbytes in launches:
            lag = self.lag(taken, scale * (ready - self.first_ready))
            free = max(free, scale * ready + lag) + float(self.network.all_reduce(nbytes))
            taken += self.network.taken(nbytes)
        rest = scale * (self.total - ready)
        return max(free, scale * ready + lag + rest + self.lag(taken - lag, rest))

    def lag(self, taken: float, computed: float) -> float:
        """Seconds by which computation ends later if sending takes so many from the processor beside it.

        Args:
            taken: seconds of the processor that all of the sending takes.
            computed: seconds that the computation beside it takes alone.
        """
        share = min(0.5, self.network.bandwidth * self.network.cpu_per_byte)
        return min(taken, share / (1 - share) * computed)
