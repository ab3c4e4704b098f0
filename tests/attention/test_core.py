"""Arrangement, block softmax and combination below the patterns: random block sizes, unions, groups of blocks."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra.attention import ALiBi, Visibility, arrange, core, dense, full
from tests.attention import oracle

HEADS, WIDTH, BATCH = 2, 3, 2


@dataclasses.dataclass(frozen=True)
class Band:
    """Distances -after * step .. before * step in steps; on positions of entries, or on plain integers."""

    before: int | None
    after: int | None
    step: int = 1

    def __call__(self, q, k):
        return self.reads(q.position, k.position)

    def reads(self, q, k):
        steps, rest = (q - k) // self.step, (q - k) % self.step
        allowed = rest == 0
        allowed = allowed if self.before is None else allowed & (steps <= self.before)
        return allowed if self.after is None else allowed & (steps >= -self.after)


reach = st.none() | st.integers(0, 7)
blocks = st.fixed_dictionaries(
    {"before": reach, "after": reach, "step": st.sampled_from((1, 1, 2, 3)), "block": st.integers(1, 7)}
)
tokens = st.tuples(st.integers(1, 37), st.integers(0, 17))  # T and S - T


def random_arrays(rng, length, size, batch=BATCH):
    normal = lambda n: jnp.asarray(rng.normal(size=(batch, n, HEADS, WIDTH)), jnp.float32)  # noqa: E731
    return normal(length), normal(size), normal(size)


def gradients(function, cotangents, *args):
    """The output and the gradients by all arguments, compiled in a third of the usual time."""

    def both(cotangents, *args):
        out, pull = jax.vjp(function, *args)
        return out, pull(cotangents)

    return jax.jit(both, compiler_options={"xla_backend_optimization_level": 0})(cotangents, *args)


@hypothesis.settings(derandomize=True, max_examples=25, deadline=None, database=None)
@hypothesis.given(tokens, blocks)
def test_every_allowed_pair_lies_in_a_listed_pair_of_blocks(tokens, options):
    length, extra = tokens
    size = length + extra
    # Every entry holds its own index, counted from 1: paddings hold 0.
    index = np.broadcast_to(np.arange(1, size + 1, dtype=np.float32)[None, :, None, None], (BATCH, size, HEADS, 1))
    grid = jax.jit(lambda x: arrange.band(x[:, extra:], x, x, Visibility(), **options))(index)
    restored = grid.restore(grid.q)
    np.testing.assert_array_equal(restored, index[:, extra:])
    rule = Band(options["before"], options["after"], options["step"])
    q_index, k_index = (np.asarray(x[:, 0, :, 0, :, 0], int) - 1 for x in (grid.q, grid.k))  # [N, R, block]
    assert max(q_index.shape[2], k_index.shape[2]) <= options["block"]
    for side, held in ((grid.queries, q_index), (grid.keys, k_index)):
        real = held >= 0
        np.testing.assert_array_equal(np.broadcast_to(side.position[:, 0, :, 0], held.shape)[real], held[real])
        valid = np.ones_like(real) if side.valid is None else np.broadcast_to(side.valid[:, 0, :, 0], real.shape)
        np.testing.assert_array_equal(valid, real)
    found, useful = [], set()
    q_place, k_place = (np.asarray(side.position[:, 0, :, 0]) for side in (grid.queries, grid.keys))
    for i in range(len(q_index)):
        for j in range(len(k_index)):
            met = rule.reads(q_place[i][:, :, None], k_place[j][:, None, :])
            if met.any():
                useful.add((i, j))
            real = met & (q_index[i][:, :, None] >= 0) & (k_index[j][:, None, :] >= 0)
            found += [(q_index[i][r, a], k_index[j][r, b]) for r, a, b in np.argwhere(real)]
    want = {(t, s) for t in range(extra, size) for s in range(size) if rule.reads(t, s)}
    assert len(found) == len(set(found))
    assert set(found) == want
    assert set(grid.layout.pairs) == useful
    assert len(grid.layout.pairs) == len(useful)


@hypothesis.settings(derandomize=True, max_examples=8, deadline=None, database=None)
@hypothesis.given(tokens, blocks, st.integers(0, 2**31))
def test_blocks_equal_dense(tokens, options, seed):
    rng = np.random.default_rng(seed)
    length, extra = tokens
    q, k, v = random_arrays(rng, length, length + extra)
    valid = jnp.asarray(rng.random((BATCH, length + extra)) < 0.8)
    rule, terms = (
        Band(options["before"], options["after"], options["step"]),
        (ALiBi(num_layers=1, width=HEADS * WIDTH, num_heads=HEADS, head_dim=WIDTH, rngs=None)(),),
    )
    t, s = np.arange(extra, length + extra)[:, None], np.arange(length + extra)
    allowed = jnp.asarray(rule.reads(t, s)) & valid[:, None, extra:, None] & valid[:, None, None]
    allowed = jnp.broadcast_to(allowed, (BATCH, HEADS, *allowed.shape[2:]))

    def blocks(q, k, v, terms):
        grid = arrange.band(q, k, v, Visibility(q_valid=valid[:, extra:], k_valid=valid), **options)
        return core.attend(grid, rule=rule, scale=0.7, terms=terms).out

    def grid(q, k, v, terms):
        return dense.attend(q, k, v, allowed=allowed, scale=0.7, terms=terms)[0]

    d_out = jnp.asarray(rng.normal(size=q.shape), jnp.float32)
    got, want = (gradients(f, d_out, q, k, v, terms) for f in (blocks, grid))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(x - y) <= 1e-5 * max(np.linalg.norm(y), 1)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_union_of_disjoint_keys(parts, rng):
    """Rows: keys dealt at random and some to nobody, all to the last part, none at all. Cotangents of logsumexp too."""
    length, size = 19, 23
    q, k, v = random_arrays(rng, length, size, batch=3)
    owner = np.stack([rng.integers(-1, parts, size), np.full(size, parts - 1), np.full(size, -1)])
    owner[0, :6] = -1  # the first two queries of that row read nothing
    allowed = (np.arange(size) <= np.arange(size - length, size)[:, None]) & (owner >= 0)[:, None]
    some = jnp.asarray(allowed.any(-1))[..., None]  # [B, T, 1]

    def union(q, k, v):
        masks = [Visibility(k_valid=jnp.asarray(owner == part)) for part in range(parts)]
        grids = [arrange.band(q, k, v, mask, before=None, after=0, block=8) for mask in masks]
        joined = core.union(*(core.attend(grid, rule=Band(None, 0), scale=0.7) for grid in grids))
        floor = core.empty(jnp.float32)
        return joined.out, jnp.where(some, joined.logsumexp, 0), jnp.where(some, floor, joined.logsumexp)

    def whole(q, k, v):
        read = jnp.broadcast_to(jnp.asarray(allowed)[:, None], (3, HEADS, length, size))
        s = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest") * 0.7
        logsumexp = jnp.where(read.any(-1), jax.nn.logsumexp(s, axis=-1, where=read), 0).swapaxes(1, 2)
        out, _ = dense.attend(q, k, v, allowed=read, scale=0.7)
        return out, logsumexp, jnp.full_like(logsumexp, core.empty(jnp.float32))

    d = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (q.shape, q.shape[:3], q.shape[:3])]
    got, got_d = gradients(union, tuple(d), q, k, v)
    want, want_d = gradients(whole, (*d[:2], jnp.zeros_like(d[2])), q, k, v)
    for x, y in zip((*got, *got_d), (*want, *want_d), strict=True):
        assert oracle.error(x, y) < 1e-5
    np.testing.assert_array_equal(np.asarray(got[0])[~np.asarray(some)[..., 0]], 0)


@pytest.mark.parametrize(("dropout", "sizes"), [(0.0, (1, 2, 100)), (0.3, (1, 5))])
def test_groups_of_blocks_equal_single_blocks(dropout, sizes, rng, monkeypatch):
    """Budgets of one, a few and all blocks at a time; the masks of dropout do not depend on them."""
    q, k, v = random_arrays(rng, 50, 58)
    d = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (q.shape, q.shape[:3])]
    groups, steps = [], core._steps

    def spy(pairs, together):
        groups.append(together)
        return steps(pairs, together)

    def both(q, k, v):
        grid = arrange.band(q, k, v, Visibility(), before=19, after=3, block=8)
        part = core.attend(grid, rule=Band(19, 3), scale=0.7, dropout=dropout, key=jax.random.key(3))
        return part.out, part.logsumexp

    monkeypatch.setattr(core, "_steps", spy)
    results = []
    for blocks in sizes:
        monkeypatch.setitem(core.SCORE_BYTES, "cpu", blocks * 4 * BATCH * HEADS * 8 * 8)
        results.append(jax.tree.leaves(gradients(both, tuple(d), q, k, v)))
    assert set(groups) == {min(blocks, 7) for blocks in sizes}  # there are 7 blocks of queries
    for other in results[1:]:
        for x, y in zip(other, results[0], strict=True):
            assert oracle.error(x, y) < 1e-6


@hypothesis.settings(derandomize=True, deadline=None, database=None)
@hypothesis.given(st.sets(st.tuples(st.integers(0, 9), st.integers(0, 12))), st.integers(1, 7))
def test_steps_visit_each_pair_once(pairs, together):
    visited = []
    for size, starts in core._steps(tuple(pairs), together):
        assert size in (1, together)
        visited += [(i + n, j + n) for i, j in starts for n in range(size)]
    assert len(visited) == len(pairs)
    assert set(visited) == pairs


@pytest.mark.parametrize(("causal", "pairs"), [(True, 10), (False, 16)])
def test_blocks_after_the_query_are_skipped(causal, pairs, monkeypatch):
    seen, x = [], jax.ShapeDtypeStruct((1, 4 * arrange.BLOCK, 1, 8), jnp.float32)
    spy = lambda grid, **_: seen.append(grid.layout.pairs) or core.Partial(grid.v, grid.v)  # noqa: E731
    monkeypatch.setattr(core, "attend", spy)
    jax.eval_shape(functools.partial(full.__wrapped__, causal=causal), x, x, x)
    assert len(seen[0]) == pairs
