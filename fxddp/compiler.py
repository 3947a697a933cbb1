"""Compiles one Dynamo graph: forward as it is, backward through the passes, each piece by the inner compiler."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import Tensor, fx

from . import _compat
from .artifact import InPieces, SplitBackward, SplitForward, loading
from .config import Settings
from .passes import pipeline
from .passes.alike import structure
from .passes.choosing import choose_plan
from .passes.cost import Speeds, Work, graph_work, rounded
from .passes.forward import Reads, cut_forward, first_needed, reading, with_work
from .passes.launching import CAUTION, plan_launches
from .passes.outline import Outline
from .passes.plan import Bucket, BucketPlan, GradSpec
from .passes.stages import Way
from .passes.tables import roughly

_nbytes = attrgetter("nbytes")

PieceCompiler = Callable[[fx.GraphModule, Sequence[Any]], Any]


class Compilation:
    """Turns one Dynamo graph into a callable, and keeps what became of its backward.

    Attributes:
        backward: the compiled backward, once there is one.
        forward: the compiled forward, if it runs in pieces that wait for the parameters they read.
        forward_graph: the forward graph, if graphs are kept.
        speeds: what the plan is made for; None if nothing depends on it.
    """

    def __init__(
        self,
        settings: Settings,
        parameters: Mapping[int, Tensor],
        way: Way,
        speeds: Speeds | None = None,
    ) -> None:
        self._settings = settings
        self.speeds = speeds
        self._parameters = _compat.stand_ins(parameters)  # compiled code outlives models
        self._way = way
        self._forward_outputs: tuple[Any, ...] = ()
        self._forward_work = Work()
        self._reads: tuple[Reads, ...] = ()
        self.backward: SplitBackward | None = None
        self.forward: SplitForward | None = None
        self.forward_graph: fx.GraphModule | None = None

    def compile(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles forward and backward; the result takes the Dynamo graph's inputs."""
        settings = self._settings
        with loading(self._receive):
            if settings.inductor:
                if _compat.cudagraphs_enabled():
                    raise ValueError(
                        "torch._inductor.config.triton.cudagraphs is True, and fxddp does not support CUDA graphs yet: "
                        "set it to False"
                    )
                return _compat.inductor_compile(
                    gm,
                    inputs,
                    inner_compile=self._inductor,
                    patches=dict(settings.options),
                    fingerprint=self._fingerprint(),
                    cache=not settings.keep_graphs,
                )
            inner = partial(_boxed, settings.inner) if callable(settings.inner) else _interpret
            return _compat.aot_compile(
                gm,
                inputs,
                forward=partial(self._forward, inner),
                backward=partial(self._backward, inner),
                inference=partial(self._inference, inner),
            )

    def _receive(self, artifact: InPieces) -> None:
        if isinstance(artifact, SplitBackward):
            self.backward = artifact
        elif isinstance(artifact, SplitForward):
            self.forward = artifact

    def _inductor(self, gm: fx.GraphModule, inputs: Sequence[Any], **arguments: Any) -> Any:
        if arguments.get("is_backward"):
            return self._backward(partial(_compat.inductor_piece, arguments=arguments), gm, inputs)
        whole = partial(_compat.inductor_inner_compile, **arguments) if self._settings.compile_pieces else _interpret
        if arguments.get("is_inference"):
            return self._inference(whole, gm, inputs)
        cut = self._cut_forward(partial(_compat.inductor_piece, arguments=arguments), gm)
        return self._inference(whole, gm, inputs) if cut is None else cut

    def _forward(self, inner: PieceCompiler, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        cut = self._cut_forward(inner, gm)
        return self._inference(inner, gm, inputs) if cut is None else cut

    def _inference(self, inner: PieceCompiler, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        self._look_at_forward(gm)
        return inner(gm, inputs)

    def _cut_forward(self, inner: PieceCompiler, gm: fx.GraphModule) -> SplitForward | None:
        """The forward in pieces, if waits are to move into it."""
        settings = self._settings
        if settings.overlap is None or not settings.compile_pieces or not self._parameters:
            return None
        found = cut_forward(_compat.copy_graph(gm), parameters=self._parameters.keys(), size=settings.forward_size)
        if found is None:
            return None
        self._look_at_forward(gm)
        program, pieces = found
        return SplitForward(program, _compile_all(inner, pieces)).announce()

    def _look_at_forward(self, gm: fx.GraphModule) -> None:
        self._forward_outputs = _compat.output_descriptors(gm)
        self._forward_work = graph_work(gm)
        if self._settings.overlap is not None:
            self._reads = with_work(gm, reading(gm, parameters=self._parameters.keys()))
        if self._settings.keep_graphs:
            self.forward_graph = _compat.copy_graph(gm)

    def _backward(self, inner: PieceCompiler, gm: fx.GraphModule, inputs: Sequence[Any]) -> SplitBackward:
        settings = self._settings
        rewritten = pipeline.rewrite_backward(
            _compat.copy_graph(gm),  # AOTAutograd may come with the same graph again
            parameters=self._parameters,
            forward_outputs=self._forward_outputs,
            cap=settings.cap,
            first_cap=settings.first_cap,
            caps=settings.caps,
            choose=partial(choose_plan, speeds=self.speeds, sent=self._sent) if settings.auto and self.speeds else None,
            wire=settings.wire,
            launch=None if settings.overlap is None else self._launches,
            way=self._way,
            inputs=inputs,
            fold=settings.inductor and _compat.calls_products(),
            keep=settings.keep_graphs,
        )
        mutated = _compat.mutated_inputs()
        _compat.forbid_donation()
        if not settings.compile_pieces:
            backward = SplitBackward(rewritten.program, (), mutated)
        elif settings.split or not rewritten.plan.buckets or not all(map(_nbytes, rewritten.plan.buckets)):
            backward = SplitBackward(rewritten.program, _compile_all(inner, rewritten.pieces), mutated)
        else:
            backward = SplitBackward(rewritten.program, (), mutated)
            backward.whole = _compile(inner, rewritten.gm)
            backward.way = self._way
            # settings live in a context of their own per thread: autograd's CUDA threads see none of this one's
            again = _compat.saved_context()
            backward.local = partial(copy_context().run, _compile_later, again, inner, rewritten.pieces)
        backward.outline = replace(rewritten.outline, forward=self._forward_work, reads=self._reads)
        if settings.keep_graphs:
            backward.rewritten = rewritten
        return backward.announce()

    def _launches(self, plan: BucketPlan, told: Outline) -> tuple[tuple[int, ...], ...]:
        """Which buckets are launched when one has been packed, so that the next forward waits little."""
        speeds = self.speeds
        assert speeds is not None
        values = rounded(told.values)
        seconds = [CAUTION * float(speeds.machine.seconds(piece.work.at(values))) for piece in told.pieces]
        sent = [sum(self._sent(roughly(grad)) for grad in bucket.grads) for bucket in plan.buckets]
        sending = [float(speeds.network.all_reduce(nbytes)) for nbytes in sent]
        return plan_launches(list(accumulate(seconds))[: len(sending)], sending, first_needed(plan, self._reads))

    def _sent(self, grad: GradSpec) -> int:
        """Bytes that travel for a gradient."""
        assert self.speeds is not None
        return self._settings.wire_bytes(Bucket(0, (grad,)), self.speeds.network.world_size)

    def _fingerprint(self) -> str:
        """What the backward depends on beyond the Dynamo graph: fxddp's code, settings, and who is a parameter."""
        settings = self._settings
        parts = (
            source_digest(),
            settings.cap,
            settings.first_cap,
            settings.caps,
            settings.wire,
            settings.split,
            settings.overlap,
            tuple(sorted(self._parameters)),
            self.speeds,
            None if self.speeds is None else str(settings.codec),
        )
        where = None if settings.split else self._way
        return hashlib.sha256(repr((parts, where)).encode()).hexdigest()


def _compile(inner: PieceCompiler, gm: fx.GraphModule) -> Any:
    return inner(gm, [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")])


def _compile_all(inner: PieceCompiler, pieces: Sequence[fx.GraphModule]) -> list[Any]:
    """The compiled pieces; those that are alike are one."""
    compiled: dict[object, Any] = {}
    found = []
    for piece in pieces:
        key = structure(piece) or piece
        if key not in compiled:
            compiled[key] = _compile(inner, piece)
        found.append(compiled[key])
    return found


def _compile_later(again: Callable[[], Any], inner: PieceCompiler, pieces: Sequence[fx.GraphModule]) -> list[Any]:
    with again(), _compat.functorch_settings():
        return _compile_all(inner, pieces)


def _interpret(gm: fx.GraphModule, _: Sequence[Any]) -> Any:
    """Runs the graph's operators one by one: the "aot_eager" inner compiler."""
    return _takes_list(gm)


def _boxed(inner: Callable[..., Any], gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """A user's inner compiler, its result called with one list."""
    compiled = inner(gm, inputs)
    return compiled if getattr(compiled, "_boxed_call", False) else _takes_list(compiled)


def _takes_list(function: Callable[..., Any]) -> Any:
    """A function of one list, which it empties so that its values can be freed early; AOTAutograd's boxed calling."""

    def run(arguments: list[Any]) -> Any:
        values = tuple(arguments)
        arguments.clear()
        return function(*values)

    return _compat.mark_boxed(run)


@cache
def source_digest() -> str:
    """Changes with any line of fxddp, so that a compile cache never serves what another version wrote."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for path in sorted([*here.glob("*.py"), *here.glob("*/*.py")]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
