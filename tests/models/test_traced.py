"""Operations and kept bytes of functions that can be counted by hand."""

import jax
import jax.numpy as jnp
import pytest

from lra.models.traced import flops, kept


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def turns(n):
    """n products of a row of 3 with a 3 x 3 matrix, one after the other."""
    return lambda w, x: jax.lax.scan(lambda x, _: (x @ w, None), x, length=n)[0]


def convolution(x, w):
    return jax.lax.conv_general_dilated(x, w, (2,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))


@pytest.mark.parametrize(
    ("function", "arguments", "want"),
    [
        (lambda a, b: a @ b, [shape(2, 3), shape(3, 5)], 2 * 2 * 3 * 5),
        (lambda a, b: jnp.einsum("bij,bkj->bik", a, b), [shape(7, 2, 3), shape(7, 5, 3)], 2 * 7 * 2 * 3 * 5),
        (jax.vmap(lambda a, b: a @ b), [shape(7, 2, 3), shape(7, 3)], 2 * 7 * 2 * 3),
        (jax.jit(lambda a, b: jnp.sin(a @ b) + 1), [shape(2, 3), shape(3, 5)], 2 * 2 * 3 * 5),
        (turns(11), [shape(3, 3), shape(3)], 11 * 2 * 3 * 3),
        (lambda w, x: jax.vmap(turns(11), (None, 0))(w, x), [shape(3, 3), shape(5, 3)], 5 * 11 * 2 * 3 * 3),
        # Each product has two in its gradient; the input's own is not asked for in the first turn, but a loop has it.
        (jax.grad(lambda w, x: turns(11)(w, x).sum()), [shape(3, 3), shape(3)], 3 * 11 * 2 * 3 * 3),
        # Recomputation is counted.
        (
            jax.grad(jax.checkpoint(lambda w, x: jnp.sin(jnp.sin(x @ w) @ w).sum())),
            [shape(3, 3), shape(3)],
            (2 + 2 + 3) * 2 * 3 * 3,
        ),
        (lambda p, a: jax.lax.cond(p, lambda: a @ a, lambda: a @ a @ a), [shape(dtype=bool), shape(3, 3)], 108),
        # 4 places, 5 outputs, a kernel of 3 x 2 inputs.
        (convolution, [shape(1, 9, 2), shape(3, 2, 5)], 2 * 4 * 5 * 3 * 2),
        (lambda a: jnp.exp(a).sum() + a[0], [shape(5)], 0),
        (lambda a: jax.lax.while_loop(lambda a: a.sum() < 9, lambda a: a + 1, a), [shape(5)], 0),
    ],
    ids=["matrix", "batch", "vmap", "jit", "scan", "vmap of scan", "grad", "remat", "cond", "conv", "none", "while"],
)  # fmt: skip
def test_operations(function, arguments, want):
    assert flops(function, *arguments) == want


def test_products_in_a_loop_without_end():
    def endless(a):
        return jax.lax.while_loop(lambda a: a.sum() < 9, lambda a: a @ a, a)

    with pytest.raises(ValueError, match="products in a `while_loop` cannot be counted"):
        flops(endless, shape(3, 3))


def test_operations_equal_those_that_the_compiler_counts(rng):
    """A dense layer, in which XLA counts elementwise work too: below 2 % of it here."""

    def run(w, x):
        return jnp.maximum(x @ w, 0) @ w.T

    counted = jax.jit(run).lower(shape(256, 512), shape(64, 256)).compile().cost_analysis()["flops"]
    assert flops(run, shape(256, 512), shape(64, 256)) == pytest.approx(counted, rel=0.02)


def dense(w, x):
    """sin(sin(x w) w): a gradient needs x, the cosines of both products, and what the second product read."""
    return jnp.sin(jnp.sin(x @ w) @ w).sum()


@pytest.mark.parametrize(
    ("function", "want"),
    [
        (dense, 4 * 4 * 5 * 3),
        (jax.jit(dense), 4 * 4 * 5 * 3),
        (jax.checkpoint(dense), 4 * 5 * 3),
        (lambda w, x: w.sum() + x.sum(), 0),
        (lambda w, x: jnp.sin(w).sum() + x.sum(), 0),  # kept, but of the parameters alone
        (lambda w, x: (x[0] @ w).sum(), 4 * 3),
    ],
    ids=["plain", "jit", "checkpoint", "sum", "parameters", "part"],
)
def test_kept_bytes(function, want):
    assert kept(function, shape(3, 3), shape(5, 3)) == want


def test_a_loop_keeps_what_depends_on_the_input_for_each_turn():
    """Products of x by sines of three matrices: three x are kept; what is kept of the matrices is not counted."""

    def loop(w, x):
        return jax.lax.scan(lambda x, w: (x @ jnp.sin(w), None), x, w)[0].sum()

    assert kept(loop, shape(3, 5, 5), shape(7, 5)) == 3 * 4 * 7 * 5
