"""`python -m fxddp explain`: reports from the command line.

    python -m fxddp explain package.module:make_model --input-shape 8,3,224,224 --world-size 64 --bandwidth 100Gbit/s
    python -m fxddp explain model.py:GPT --input-shape 8,128:int64 --html report.html --trace trace.json --json
    python -m fxddp explain compare package.module:make_model --input-shape … --bucket-mb 5 25
    python -m fxddp explain compare before.json after.html

The target is a model, or a function or class that is called without arguments and makes one; a function may return
`(model, inputs)` and needs no `--input-shape` then. Inputs are one, a tuple of them, or a dict of keyword arguments.
Nothing is trained, sent, or put on a device.

Exit codes: 0, 1 the model could not be explained, 2 an argument is wrong.
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fxddp import units
from fxddp.arguments import positive, whole
from fxddp.config import AUTO, make_settings
from fxddp.notes import reason

from . import explain
from .compare import compare, figures
from .report import Explanation

TRAVEL = ("comm_hook", "algorithm", "overlap")
"""Arguments of `fxddp.backend` that are given as they are."""


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        """Ends the process."""
        self.exit(2, f"{self.prog}: error: {message} (--help tells about the arguments)\n")


class Wrong(Exception):
    """An argument that cannot be used; the message is one line for the user."""


def main(argv: Sequence[str]) -> int:
    """Runs the command with the arguments after `explain`; returns its exit code."""
    arguments = list(argv)
    compares = arguments[:1] == ["compare"]
    parser = _parser(compares=compares)
    options = parser.parse_args(arguments[compares:])
    try:
        with _quiet_torch(quiet=not options.traceback):
            return _compare(options) if compares else _explain(options)
    except Wrong as error:
        return _fail(parser, error, 2)
    except BrokenPipeError:
        raise
    except Exception as error:
        if options.traceback:
            raise
        cause = _behind(error)
        return _fail(parser, reason(cause), 1)


def _behind(error: BaseException) -> BaseException:
    """What the user's model raised, below what Dynamo makes of it."""
    while type(error).__module__.startswith("torch._dynamo") and (error.__cause__ or error.__context__):
        error = error.__cause__ or error.__context__ or error
    return error


@contextlib.contextmanager
def _quiet_torch(*, quiet: bool) -> Iterator[None]:
    """Keeps torch from writing its own account of an error before ours."""
    names = [name for name in logging.root.manager.loggerDict if quiet and name.split(".")[0] == "torch"]
    handlers = [handler for name in names for handler in logging.getLogger(name).handlers]
    levels = [handler.level for handler in handlers]
    for handler in handlers:
        handler.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for handler, level in zip(handlers, levels, strict=True):
            handler.setLevel(level)


def _fail(parser: argparse.ArgumentParser, error: object, code: int) -> int:
    line = next((line for line in str(error).strip().splitlines() if line.strip()), type(error).__name__)
    hint = "" if code == 2 else " (--traceback shows where)"
    print(f"{parser.prog}: error: {line}{hint}", file=sys.stderr)
    return code


def _parser(*, compares: bool) -> argparse.ArgumentParser:
    what = "explain compare" if compares else "explain"
    parser = Parser(
        prog=f"python -m fxddp {what}",
        description=(
            "Compare two bucket sizes for a model, or two saved reports."
            if compares
            else "Show what data-parallel training of a model sends, when, and what it costs. "
            "`explain compare` puts two of them side by side."
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    target = "package.module:name or file.py:name: a model, or what makes one when called"
    if compares:
        parser.add_argument("target", nargs="+", help=f"{target}; or two saved reports (.json or .html)")
        parser.add_argument("--bucket-mb", type=_mib, nargs=2, default=[5, 25], help="two bucket sizes in MiB, or auto")
    else:
        parser.add_argument("target", help=target)
        parser.add_argument("--bucket-mb", type=_mib, default=25, help="size of a bucket in MiB, or auto")
        parser.add_argument("--html", type=Path, help="write the report as one page")
        parser.add_argument("--trace", type=Path, help="write the step as a Chrome trace")
        parser.add_argument("--measure", action="store_true", help="run the model and measure it")
        parser.add_argument("--code", action="store_true", help="with --json: the code of all graphs, too")
    parser.add_argument(
        "--input-shape",
        action="append",
        default=[],
        metavar="SHAPE[:DTYPE]",
        help="shape of one input, such as 8,3,224,224 or 8,128:int64; repeat for several",
    )
    parser.add_argument("--first-bucket-mb", type=float, default=1, help="size of the first bucket in MiB")
    parser.add_argument("--world-size", type=int, help="number of ranks")
    parser.add_argument("--bandwidth", help="of each rank: 100Gbit/s, 12.5GB/s")
    parser.add_argument("--latency", help="of a message: 5us")
    parser.add_argument("--flops", type=float, help="operations per second of one rank: 1e14")
    parser.add_argument("--memory-bandwidth", help="of one rank: 2TB/s")
    parser.add_argument("--device", help="explain as if there: cuda")
    parser.add_argument("--comm-hook", help="how gradients are compressed: fp16, bf16")
    parser.add_argument("--algorithm", help="how they are added up: ring")
    parser.add_argument("--overlap", help="next_forward: waits move there, as with an optimizer in the backward")
    parser.add_argument("--inner", default="inductor", help="inner compiler, which decides about decompositions")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--traceback", action="store_true", help="show where a model fails")
    return parser


def _explain(options: argparse.Namespace) -> int:
    found = _report(options, options.bucket_mb, measure=options.measure)
    if options.html:
        _write(found.save, options.html)
    if options.trace:
        _write(found.save_trace, options.trace)
    print(found.to_json(code=options.code) if options.json else found)
    return 0


def _compare(options: argparse.Namespace) -> int:
    targets = options.target
    saved = [target for target in targets if target.endswith((".json", ".html"))]
    if len(saved) == len(targets) == 2:
        before, after = (_load(path) for path in saved)
    elif len(targets) == 1 and not saved:
        before, after = (_report(options, mib) for mib in options.bucket_mb)
    else:
        raise Wrong(f"compare takes one model or two saved reports (.json or .html), got {' '.join(targets)}")
    if options.json:
        print(json.dumps({row.name: {**asdict(row), "change": row.change} for row in figures(before, after)}))
    else:
        print(compare(before, after))
    return 0


def _load(path: str) -> Explanation:
    try:
        return Explanation.load(path)
    except OSError as error:
        raise Wrong(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise Wrong(error if str(error).startswith(path) else f"{path}: {error}") from None


def _write(save: Callable[[Path], None], path: Path) -> None:
    try:
        save(path)
    except OSError as error:
        raise Wrong(f"{path}: {error.strerror}") from None


def _mib(text: str) -> float | str:
    with contextlib.suppress(ValueError):
        return text if text == AUTO else float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor {AUTO}")


def _check_figures(options: argparse.Namespace) -> None:
    for name, read in (
        ("world_size", partial(whole, "world_size", least=1)),
        ("bandwidth", units.bandwidth),
        ("memory_bandwidth", partial(units.bandwidth, what="memory_bandwidth")),
        ("latency", units.seconds),
        ("flops", partial(positive, "flops")),
    ):
        value = getattr(options, name)
        if value is not None:
            try:
                read(value)
            except ValueError as error:
                raise Wrong(f"--{name.replace('_', '-')}: {error}") from None


def _settings(options: argparse.Namespace, bucket_mb: float | str, model: nn.Module) -> dict[str, Any]:
    """The arguments of `fxddp.backend`."""
    found: dict[str, Any] = {"bucket_mb": bucket_mb, "inner": options.inner}
    if bucket_mb != AUTO:
        found["first_bucket_mb"] = options.first_bucket_mb
    found |= {name: getattr(options, name) for name in TRAVEL if getattr(options, name) is not None}
    try:
        if options.overlap is not None:
            found["optimizer"] = torch.optim.SGD(model.parameters())  # whichever: none is ever stepped
        make_settings(**found)
    except ValueError as error:
        raise Wrong(error) from None
    return found


def _report(options: argparse.Namespace, bucket_mb: float | str, *, measure: bool = False) -> Explanation:
    _check_figures(options)
    if options.device is not None:
        if measure:
            raise Wrong("--measure runs the model on the CPU: leave --device out")
        try:
            torch.device(options.device)
        except RuntimeError:
            raise Wrong(f"--device: {options.device!r} is no device that torch knows") from None
    where = torch.device("meta") if options.device else torch.device("cpu")
    with where:
        model, inputs, named = _model(options.target if isinstance(options.target, str) else options.target[0])
        if options.input_shape:
            inputs, named = tuple(_input(text) for text in options.input_shape), {}
    settings = _settings(options, bucket_mb, model)
    if not inputs and not named:
        raise Wrong("--input-shape is needed: the shape of each input of the model, such as 8,3,224,224 or 8,128:int64")
    torch.compiler.reset()
    return explain(
        model,
        *inputs,
        kwargs=named,
        world_size=options.world_size,
        bandwidth=options.bandwidth,
        latency=options.latency,
        flops=options.flops,
        memory_bandwidth=options.memory_bandwidth,
        device=options.device,
        measure=measure,
        **settings,
    )


def _model(target: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model, and the inputs that come with it: positional and keyword arguments."""
    where, _, name = target.partition(":")
    if not where or not name:
        raise Wrong(f"{target!r} is not package.module:name or file.py:name")
    value = _imported(where)
    for part in name.split("."):
        if not hasattr(value, part):
            raise Wrong(f"{where} has no {part!r}")
        value = getattr(value, part)
    if callable(value) and not isinstance(value, nn.Module):
        value = value()
    inputs: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    if isinstance(value, tuple) and len(value) == 2:
        value, given = value
        if isinstance(given, dict):
            named = given
        else:
            inputs = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    if not isinstance(value, nn.Module):
        raise Wrong(f"{target} gave a {type(value).__name__}; expected an nn.Module, or (nn.Module, inputs)")
    return value, inputs, named


def _imported(where: str) -> Any:
    with _importing_here():
        if not where.endswith(".py"):
            try:
                return importlib.import_module(where)
            except ModuleNotFoundError as error:
                raise Wrong(f"there is no module {error.name!r}, looking from {Path.cwd()}") from None
        path = Path(where)
        if not path.exists():
            raise Wrong(f"{where}: no such file")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # classes look their module up
        spec.loader.exec_module(module)
        return module


@contextlib.contextmanager
def _importing_here() -> Iterator[None]:
    """As `python -m` does: modules of the present folder can be imported."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path.remove(str(Path.cwd()))


def _input(text: str) -> Tensor:
    shape, _, name = text.partition(":")
    dtype = getattr(torch, name or "float32", None)
    try:
        separator = "," if "," in shape else "x"
        sizes = [int(size) for size in shape.removesuffix(",").split(separator)] if shape else []
    except ValueError:
        raise Wrong(f"--input-shape: {shape!r} is not a shape such as 8,3,224,224") from None
    if not isinstance(dtype, torch.dtype):
        raise Wrong(f"--input-shape: {name!r} is not a dtype such as float32 or int64")
    if any(size < 0 for size in sizes):
        raise Wrong(f"--input-shape: {shape!r} has a negative size")
    return torch.zeros(sizes, dtype=dtype)
