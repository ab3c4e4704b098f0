"""Reformer attention as released: the first chunk of a round reads the last one of the round before as well."""

import jax.numpy as jnp

from lra.attention import Visibility, core
from lra.attention.lsh import SharedRule, unit
from lra.attention.sorted_chunks import arranged, combined, earlier, sort


def released(q, v, buckets, *, chunk, causal, scale, within=None, once=False, visibility=None):
    """What the programs do: `lsh` from its parts, and the keys that the first chunks read besides.

    Args:
        q: queries, which are the keys, [B, S, H, D]. v: [B, S, H, E]. buckets: [B, S, H, rounds].
        within: how many buckets there are, where those of other buckets are left out; once: whether a key counts once.
    """
    visibility, k = visibility or Visibility(), unit(q)
    rule = SharedRule(causal, ("own",), earlier(buckets.shape[-1]) if once else ())
    grid, index, place = arranged(q, k, v, buckets, visibility, chunk=chunk, within=within, once=once)
    part = combined(core.attend(grid, rule=rule, scale=scale), index, place)
    times = _wrapped(sort(buckets, visibility)[1] // chunk, q.shape[1] // chunk, within, once)
    place = jnp.arange(q.shape[1], dtype=jnp.int32)
    seen = (place < place[:, None] if causal else place != place[:, None]) & (times > 0)
    if visibility.k_valid is not None:
        seen = seen & visibility.k_valid[:, None, None]
    s = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest") * scale
    floor = core.empty(s.dtype)
    s = jnp.where(seen, s + jnp.log(jnp.where(seen, times, 1)), floor)
    top = jnp.max(s, -1, keepdims=True)
    weights = jnp.where(seen, jnp.exp(s - jnp.maximum(top, floor / 2)), 0)
    total = weights.sum(-1)
    safe = jnp.where(total > 0, total, 1)
    more = core.Partial(
        jnp.einsum("bhts,bshe->bthe", weights / safe[..., None], v, precision="highest"),
        jnp.where(total > 0, top[..., 0] + jnp.log(safe), floor).swapaxes(1, 2),
    )
    both = core.union(part, more)
    return jnp.where((both.logsumexp == floor)[..., None], v, both.out)


def _wrapped(number, chunks, within, once):
    """How often queries in the first chunk of a round read keys in the last one of the round before: [B, H, S, S].

    With one bucket only there is nothing: rounds number their buckets apart. `number`: [B, H, rounds, S].
    """
    first, last = number == 0, jnp.roll(number, 1, axis=2) == chunks - 1
    times = (first[..., :, None] & last[..., None, :]).sum(2, dtype=jnp.float32)
    if within is not None:
        times = times * 0
    if once:  # divided by how often a key is there, where the round before is not looked through, and 0 counts as 1e-9
        back = number[..., :, None] - number[..., None, :]
        counted = ((back == 0) | (back == 1)).sum(2, dtype=jnp.float32)
        times = times / jnp.where(counted > 0, counted, 1e-9)
    return times
