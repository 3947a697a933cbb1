"""Fixtures and settings shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.live.pool import Pool

# How long an example takes is a matter of the machine and of what else it does.
settings.register_profile("fxddp", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fxddp")


@pytest.fixture(scope="session", autouse=True)
def inductor_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One folder of compiled code for all processes of this test run, unless the user has chosen one.

    What another run left would not do: a graph from a cache has the source lines of the checkout that compiled it.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "inductor"
    with pytest.MonkeyPatch.context() as patch:
        if not os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield


@pytest.fixture(scope="session", autouse=True)
def width() -> Iterator[None]:
    """Reports are as wide here as in any other terminal, or in none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "120")
        yield


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Two live processes in one gloo group; started by the first test that runs a job."""
    with Pool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool3() -> Iterator[Pool]:
    """Three live processes, for what two ranks cannot show."""
    with Pool(3) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool4() -> Iterator[Pool]:
    """Four live processes: two nodes of two, and ranks that pass on what they are told."""
    with Pool(4) as pool:
        yield pool
