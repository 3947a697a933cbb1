"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.pool import Pool


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of compiled kernels that all workers of this test run share."""
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(scope="session")
def pool(cache_dir: Path) -> Iterator[Pool]:
    """Two live processes in one gloo group; started by the first test that runs a job."""
    with Pool(2, cache_dir=cache_dir) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool3(cache_dir: Path) -> Iterator[Pool]:
    """Three live processes, for what two ranks cannot show."""
    with Pool(3, cache_dir=cache_dir) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool4(cache_dir: Path) -> Iterator[Pool]:
    """Four live processes: two nodes of two, and ranks that pass on what they are told."""
    with Pool(4, cache_dir=cache_dir) as pool:
        yield pool
