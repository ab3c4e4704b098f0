import jax
import pytest


@pytest.fixture
def quick_compilation():
    """Compiles in a third of the time; what `make test-slow` samples runs fully optimised."""
    former = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", former)
