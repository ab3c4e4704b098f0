"""Fixtures of other people's programs, and their tolerances."""

from pathlib import Path

import jax
import numpy as np


def load(name):
    """The arrays of a fixture by name."""
    with np.load(Path(__file__).with_name(f"{name}.npz")) as stored:
        return dict(stored)


def close(got, want, atol=1e-5):
    """Outputs: the largest difference against the largest magnitude, which counts as at least 1."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    assert np.abs(got - want).max() < atol * max(1, np.abs(want).max())


def close_gradient(got, want, rtol=5e-5):
    """Gradients: the largest difference against the largest magnitude."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= rtol * np.abs(want).max()


def gradients(function, arrays, cotangent):
    """Of sum(out * cotangent), by each of the arrays; and out."""

    @jax.jit
    def both(arrays, cotangent):
        out, pull = jax.vjp(function, *arrays)
        return out, pull(cotangent)

    return both(arrays, cotangent)
