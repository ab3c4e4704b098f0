"""What memory costs: a training step without memory, with recurrence and with compressive memory, in turns.

    python scripts/memory_cost.py  # 6 layers, width 256, 8 heads, T = 512, 512 slots, batch 2, float32

Prints the processor time of a step (gradients of loss and auxiliary losses, memory full) as a median, and the medians
of ratios taken turn by turn, which hold on a busy machine. All have the term by distance of Transformer-XL but one more
without memory, which shows what the term costs.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra import attention
from lra.models import Decoder, Stack


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=512, help="tokens of a segment T")
    parser.add_argument("--slots", type=int, default=512, help="of memory; compressive memory has half of each kind")
    parser.add_argument("--rate", type=int, default=4, help="tokens of a compressed slot c")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=9, help="turns")
    options = parser.parse_args()
    half, rate = options.slots // 2, options.rate
    recurrence = functools.partial(attention.Recurrence, length=options.slots)
    compressive = functools.partial(attention.CompressiveMemory, length=half, compressed_length=half, rate=rate)
    term = (attention.XLRelative,)
    steps = {
        "none, without the term": _step(None, (), options),
        "none": _step(None, term, options),
        f"recurrence, {options.slots} slots": _step(recurrence, term, options),
        f"compressive, {half} + {half} slots, rate {rate}": _step(compressive, term, options),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.repeat):
        for name, step in steps.items():
            began = time.process_time()
            step()
            times[name].append(time.process_time() - began)
    print(f"{'memory':<40} {'CPU ms':>8} {'over none':>10} {'over the line before':>21}")
    first = before = np.asarray(times["none"])
    for name, taken in times.items():
        now = np.asarray(taken)
        over_none, over_before = np.median(now / first), np.median(now / before)
        print(f"{name:<40} {1000 * np.median(now):>8.0f} {over_none:>10.2f} {over_before:>21.2f}")
        before = now


def _step(memory: Any, terms: tuple[Any, ...], options: argparse.Namespace) -> Callable[[], Any]:
    """A compiled step that has run once."""
    model = Decoder(
        num_layers=options.layers, width=256, num_heads=8, pattern=attention.Full, terms=terms, memory=memory,
        stack=functools.partial(Stack, norm="post"), vocabulary_size=256, rngs=nnx.Rngs(0),
    )  # fmt: skip
    graph, parameters = nnx.split(model, nnx.Param)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 256, (options.batch, options.length)), jnp.int32)

    def fill(x: Any) -> Any:
        return jnp.ones_like(x) if x.dtype == bool else jnp.asarray(rng.normal(size=x.shape), x.dtype)

    remembered = jax.tree.map(fill, model.initial_memory(options.batch, True))

    def loss(parameters: Any, memory: Any) -> tuple[Any, Any]:
        scored = nnx.merge(graph, parameters).score(tokens, tokens, memory=memory, train=True)
        return scored.nats.mean() + sum(scored.losses.values()), (scored.memory, scored.metrics)

    compiled = jax.jit(jax.grad(loss, has_aux=True)).lower(parameters, remembered).compile()
    run = lambda: jax.block_until_ready(compiled(parameters, remembered))  # noqa: E731
    run()
    return run


if __name__ == "__main__":
    main()
