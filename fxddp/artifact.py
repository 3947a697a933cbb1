"""Compiled backwards and forwards in pieces: a program, its compiled pieces, and how AOTAutograd's cache holds them.

Note [compile cache]: AOTAutograd's cache, in its bundled form, stores any `OutputCode` whole. What is in pieces is one,
so a warm process loads forward, plan and pieces without tracing the backward. Everything the run needs is in it; which
parameters, group and world size it serves is decided by the call. On a cache hit no pass runs: whoever wants the plan
is told when the artifact is built or loaded (`loading`).
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

from . import _compat
from .passes.forward import ForwardProgram
from .passes.outline import Outline
from .passes.pipeline import Rewritten
from .passes.split import Program
from .passes.stages import Way

_OutputCode: Any = _compat.output_code_class()
_local = threading.local()


@contextmanager
def loading(receiver: Callable[["InPieces"], None]) -> Iterator[None]:
    """Tells `receiver` of everything in pieces that is built or loaded from a cache inside."""
    previous = getattr(_local, "receiver", None)
    _local.receiver = receiver
    try:
        yield
    finally:
        _local.receiver = previous


class InPieces(_OutputCode):  # type: ignore[misc]
    """A graph of AOTAutograd's that runs in pieces.

    Attributes:
        pieces: compiled pieces, each called with a list; one object for all that are alike.
    """

    is_backward = True

    def __init__(self, pieces: Sequence[Any]) -> None:
        super().__init__()
        self._boxed_call = True
        self.pieces: Sequence[Any] = tuple(pieces)

    def announce(self) -> Self:
        """Hands this to whoever waits for it."""
        receiver = getattr(_local, "receiver", None)
        if receiver is not None:
            receiver(self)
        return self

    def prepare_for_serialization(self) -> None:
        """Called on a copy that is about to be pickled."""
        self.pieces = _each_once(_compat.dump_piece, self.pieces)

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Called after unpickling."""
        self.pieces = _each_once(partial(_compat.load_piece, is_backward=self.is_backward), self.pieces)
        self.announce()

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Pieces carry their own."""


class SplitForward(InPieces):
    """The forward of one graph, called by AOTAutograd with a list of the graph's inputs.

    Attributes:
        program: what to run, wait for and return.
    """

    is_backward = False

    def __init__(self, program: ForwardProgram, pieces: Sequence[Any]) -> None:
        super().__init__(pieces)
        self.program = program

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Runs the forward; `inputs` is emptied."""
        from .next_forward import run_forward

        return run_forward(self, inputs)


class SplitBackward(InPieces):
    """The backward of one graph, called by AOTAutograd with a list of saved values and tangents.

    Attributes:
        program: what to run, launch and return.
        mutated: positions of the Dynamo inputs whose data the forward changes.
        outline: what `fxddp.explain` tells about it; goes with it into caches.
        whole: the unsplit backward with the collectives inside, or None.
        way: what `whole` was compiled for.
    """

    def __init__(self, program: Program, pieces: Sequence[Any], mutated: tuple[int, ...]) -> None:
        super().__init__(pieces)
        self.program = program
        self.mutated = mutated
        self.whole: Callable[[list[Any]], Any] | None = None
        self.local: Callable[[], Sequence[Any]] | None = None
        self.way: Way | None = None
        self.rewritten: Rewritten | None = None
        self.outline: Outline | None = None

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Runs the backward; `inputs` is emptied."""
        from .executor import execute

        return execute(self, inputs)

    def local_pieces(self) -> Sequence[Any]:
        """The pieces that compute local gradients; an unsplit backward compiles them when they are first needed."""
        if not self.pieces and self.local is not None:
            self.pieces = tuple(self.local())
        return self.pieces

    def prepare_for_serialization(self) -> None:
        """As `InPieces.prepare_for_serialization`."""
        if self.whole is not None:
            raise _compat.bypass_cache("an unsplit backward names its process group")
        super().prepare_for_serialization()
        self.local = self.rewritten = None


def _each_once(function: Callable[[Any], Any], pieces: Sequence[Any]) -> tuple[Any, ...]:
    """The function of each piece, called once for pieces that are the same object, and giving one for them."""
    made = {id(piece): piece for piece in pieces}
    made = {identity: function(piece) for identity, piece in made.items()}
    return tuple(made[id(piece)] for piece in pieces)
