"""The step time of a model whose spans are short under a long maximum, beside a model with a fixed window.

python scripts/adaptive_span_speed.py [TURNS]

Spans end at a quarter of S = 1024, ramp included; the window has that length, its memory too. Turn by turn in one
process, in CPU seconds, so that ratios hold on a busy machine.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra.attention import AdaptiveSpan, Pattern, Recurrence, SlidingWindow
from lra.models import Decoder, Stack

MAX_SPAN, RAMP, LENGTH, BATCH = 1024, 32, 512, 2
READ = MAX_SPAN // 4


def step(pattern: Callable[..., Pattern], memory: int) -> Callable[[], object]:
    """A gradient of a 6-layer byte model, compiled, with its memory filled."""
    model = Decoder(
        num_layers=6, width=256, num_heads=8, vocabulary_size=256, pattern=pattern,
        memory=functools.partial(Recurrence, length=memory), stack=functools.partial(Stack, scan=True),
        rngs=nnx.Rngs(0),
    ).fitted()  # fmt: skip
    parts: Any = nnx.split(model, nnx.Param, ...)
    graph, parameters, rest = parts
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (BATCH, LENGTH)), jnp.int32)
    state = jax.tree.map(lambda x: jnp.ones_like(x) if x.dtype == bool else x, model.initial_memory(BATCH, True))

    @jax.jit
    def gradient(parameters: object) -> object:
        def loss(parameters: object) -> jax.Array:
            scored = nnx.merge(graph, parameters, rest).score(tokens, tokens, memory=state, train=True)
            return scored.nats.mean() + sum(scored.losses.values())

        return jax.grad(loss)(parameters)

    return lambda: jax.block_until_ready(gradient(parameters))


def main(turns: int = 7) -> None:
    """Prints medians and their ratio to the window's."""
    spans = functools.partial(AdaptiveSpan, max_span=MAX_SPAN, ramp=RAMP, loss_coefficient=2e-6)
    steps = {
        f"window {READ}": step(functools.partial(SlidingWindow, window=READ), READ),
        f"spans of {READ} under {MAX_SPAN}": step(functools.partial(spans, initial=(READ - RAMP) / MAX_SPAN), MAX_SPAN),
        f"spans of {MAX_SPAN}": step(functools.partial(spans, initial=1.0), MAX_SPAN),
    }
    for run in steps.values():
        run()
    seconds: list[list[float]] = []
    for _ in range(turns):
        seconds.append([])
        for run in steps.values():
            began = time.process_time()
            run()
            seconds[-1].append(time.process_time() - began)
    ratios = np.median(np.asarray(seconds) / np.asarray(seconds)[:, :1], axis=0)
    for name, median, ratio in zip(steps, np.median(seconds, axis=0), ratios, strict=True):
        print(f"{name}: {median:.2f} CPU seconds, {ratio:.2f} times the window's")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
