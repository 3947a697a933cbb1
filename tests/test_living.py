"""What is alive is found, whatever was frozen, and stays frozen."""

import gc
import runpy
import weakref
from collections.abc import Iterator

import pytest
from torch import nn

from fxddp import living


@pytest.fixture(autouse=True)
def thaw() -> Iterator[None]:
    gc.collect()
    yield
    gc.unfreeze()


def found(module: nn.Module) -> bool:
    """Whether the module and its parameters are listed, once each."""
    parameters, modules = living.living()
    counts = {sum(other is p for other in parameters) for p in module.parameters()}
    counts.add(sum(other is module for other in modules))
    assert counts in ({0}, {1})
    return counts == {1}


@pytest.mark.parametrize("freezes", [0, 1, 2])
def test_everything_is_found_before_and_after_it_is_frozen(freezes: int) -> None:
    old = nn.Linear(2, 2)
    for _ in range(freezes):
        gc.freeze()
    new = nn.Linear(2, 2)
    for _ in range(3):
        assert found(old)
        assert found(new)
        new = nn.Linear(2, 2)


def test_what_is_frozen_stays_frozen() -> None:
    old = nn.Linear(2, 2)
    gc.freeze()
    assert found(old)
    assert all(other is not old for other in gc.get_objects())
    new = nn.Linear(2, 2)
    assert found(new)  # only the first look after a freeze has to freeze again
    assert any(other is new for other in gc.get_objects())


def test_frozen_again_in_between() -> None:
    first = nn.Linear(2, 2)
    gc.freeze()
    assert found(first)
    second = nn.Linear(2, 2)
    gc.freeze()
    third = nn.Linear(2, 2)
    assert found(first)
    assert found(second)
    assert found(third)
    gc.unfreeze()
    fourth = nn.Linear(2, 2)
    assert all(map(found, (first, second, third, fourth)))
    assert not gc.get_freeze_count()
    gc.freeze()
    assert all(map(found, (first, second, third, fourth)))


def test_frozen_before_the_first_look() -> None:
    old = nn.Linear(2, 2)
    gc.freeze()
    found = runpy.run_path(living.__file__)["living"]  # as it is when it has just been imported
    parameters, modules = found()
    assert any(p is old.weight for p in parameters)
    assert any(m is old for m in modules)


def test_nothing_is_kept_alive() -> None:
    module = nn.Linear(2, 2)
    gc.freeze()
    cycle = nn.Linear(2, 2)
    cycle.extra_repr = cycle.extra_repr  # type: ignore[method-assign]
    gone = [weakref.ref(module), weakref.ref(cycle)]
    del module, cycle
    living.living()
    assert not any(reference() for reference in gone), "garbage was frozen, or something is kept"
