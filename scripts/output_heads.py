"""What output heads cost with a large vocabulary: time and temporary memory of a softmax, in chunks, and adaptive.

    python scripts/output_heads.py  # WikiText-103's 267,735 ids, width 256, 1024 tokens, float32

Prints the processor time of the gradient by hidden vectors and parameters as a median, the medians of ratios to the
plain softmax taken turn by turn, which hold on a busy machine, and the temporary memory of the compiled program. Ids
are drawn by Zipf's law (frequency 1 / rank).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra.models import AdaptiveEmbedding, AdaptiveSoftmax, Embedding, Head, Softmax, TokenEmbedding


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=int, default=267_735, help="size of the vocabulary V")
    parser.add_argument("--cutoffs", type=int, nargs="+", default=[20_000, 40_000, 200_000])
    parser.add_argument("--width", type=int, default=256, help="C")
    parser.add_argument("--tokens", type=int, default=1024, help="B T")
    parser.add_argument("--chunk", type=int, default=256, help="positions at a time")
    parser.add_argument("--repeat", type=int, default=5, help="turns")
    options = parser.parse_args()
    sizes: dict[str, Any] = {"vocabulary_size": options.ids, "width": options.width, "rngs": nnx.Rngs(0)}
    cutoffs = tuple(options.cutoffs)
    heads: dict[str, tuple[TokenEmbedding, Callable[..., Head], dict[str, Any]]] = {
        "softmax": (Embedding(**sizes), Softmax, {}),
        f"softmax, {options.chunk} positions at a time": (Embedding(**sizes), Softmax, {"chunk": options.chunk}),
    }
    for div in (1, 4):
        adaptive = AdaptiveEmbedding(cutoffs=cutoffs, div_value=div, **sizes)
        heads[f"adaptive, div_value {div}"] = adaptive, AdaptiveSoftmax, {"chunk": options.chunk}
    steps = {name: _step(*head, sizes, options) for name, head in heads.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.repeat):
        for name, (step, _) in steps.items():
            began = time.process_time()
            step()
            times[name].append(time.process_time() - began)
    first = np.asarray(times["softmax"])
    print(f"{'head':<36} {'CPU ms':>8} {'of softmax':>11} {'temporary MiB':>14}")
    for name, (_, memory) in steps.items():
        now = np.asarray(times[name])
        print(f"{name:<36} {1000 * np.median(now):>8.0f} {np.median(now / first):>11.3f} {memory / 2**20:>14.0f}")


def _step(
    embedding: TokenEmbedding, kind: Callable[..., Head], options: dict[str, Any], sizes: dict[str, Any], setting: Any
) -> tuple[Callable[[], Any], int]:
    head = kind(embedding=embedding, **options, **sizes)
    graph, parameters = nnx.split((embedding, head))
    rng = np.random.default_rng(0)
    frequency = 1 / np.arange(1, setting.ids + 1)
    targets = jnp.asarray(rng.choice(setting.ids, (1, setting.tokens), p=frequency / frequency.sum()), jnp.int32)
    x = jnp.asarray(rng.normal(size=(1, setting.tokens, setting.width)), jnp.float32)

    def nats(parameters: Any, x: Any, targets: Any) -> Any:
        embedding, head = nnx.merge(graph, parameters)
        return head.score(x, embedding, targets)[0].mean()

    program = jax.jit(jax.grad(nats, argnums=(0, 1))).lower(parameters, x, targets).compile()
    jax.block_until_ready(program(parameters, x, targets))
    analysis: Any = program.memory_analysis()
    return lambda: jax.block_until_ready(program(parameters, x, targets)), analysis.temp_size_in_bytes


if __name__ == "__main__":
    main()
