"""Tokens a second with memory carried, against a full fresh window for every token (Dai et al. 2019, Table 9).

Both score bytes with a 6-layer Transformer-XL of width 256 whose tokens read 800 keys. Run from the repository's root:
    .venv/bin/python scripts/carried_speed.py
"""

import functools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from lra.attention import Full, Recurrence, XLRelative
from lra.evaluation import Carried
from lra.models import Decoder

LENGTH = 800


def main(repeat: int = 5) -> None:
    """Prints medians over turns, in seconds of both cores together, so that other processes count little."""
    model = Decoder(
        num_layers=6, width=256, num_heads=8, pattern=Full, terms=(XLRelative,), vocabulary_size=256,
        memory=functools.partial(Recurrence, length=LENGTH), rngs=nnx.Rngs(0),
    )  # fmt: skip
    model = Carried(streams=1, segment=LENGTH, attention_length=LENGTH).adapt(model)
    graph, state = nnx.split(model)
    tokens = jax.random.randint(jax.random.key(0), (1, LENGTH), 0, 256, jnp.int32)

    @jax.jit
    def score(state: nnx.State, memory: object) -> tuple[jax.Array, object]:
        scored = nnx.merge(graph, state).score(tokens, tokens, memory=memory)
        return scored.nats, scored.memory

    memory = score(state, model.initial_memory(1, train=False))[1]
    no_memory = model.initial_memory(1, train=False, length=0)
    carried, fresh = [], []
    for _ in range(repeat + 1):
        carried.append(_seconds(lambda: score(state, memory)))
        fresh.append(_seconds(lambda: score(state, no_memory)))
    a_segment, a_token = statistics.median(carried[1:]), statistics.median(fresh[1:])
    print(f"memory carried: {LENGTH / a_segment:,.0f} tokens a second, {LENGTH} tokens at once")
    print(f"fresh window:   {1 / a_token:,.1f} tokens a second, one at a time")
    print(f"ratio:          {LENGTH * a_token / a_segment:,.0f} (in the paper 363, on a GPU)")


def _seconds(run: Callable[[], object]) -> float:
    began = time.process_time()
    jax.block_until_ready(run())
    return time.process_time() - began


if __name__ == "__main__":
    main()
