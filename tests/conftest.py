"""What every test runs with: CPU, strict dtypes, corpora in a temporary folder, `rng` seeded by the test's name."""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

# Before JAX is imported, and in the environment so that the commands that tests start inherit them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

STRICT = {"attention", "models"}  # elsewhere optax (0.2.8) mixes its int32 counters with floats


def pytest_configure(config: pytest.Config) -> None:
    """Compiled functions are kept between sessions and workers: a third of the time for what was compiled before.

    Without the slow tests, XLA's older emitters compile in half the time; what is slow runs with the usual ones.
    """
    if "not slow" in config.getoption("markexpr"):
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_use_fusion_emitters=false".strip()
    cache = getattr(config, "cache", None)
    if cache is not None:  # None under `-p no:cacheprovider`, which asks that nothing be kept
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache.mkdir("jax")))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


@pytest.fixture(scope="session", autouse=True)
def data_dir(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[Path]:
    """`LRA_DATA_DIR` of the session, one folder for all workers; removed with pytest's other temporary folders."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "lra_data"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LRA_DATA_DIR", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def strict_dtypes(request: pytest.FixtureRequest) -> Iterator[None]:
    """In the tests of the mathematics, mixed dtypes raise instead of being promoted silently."""
    if STRICT.isdisjoint(request.path.parts):
        yield
        return
    import jax

    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(autouse=True)
def few_optimizations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Outside the tests of attention programs compile in a third of the time, since they run for a few steps only."""
    if "attention" in request.path.parts:
        yield
        return
    import jax

    former = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # for the processes that tests start
    yield
    jax.config.update("jax_disable_most_optimizations", former)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator whose seed is the test's name and parameters, so that order and neighbours don't matter."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))
