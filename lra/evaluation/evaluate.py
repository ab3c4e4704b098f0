"""The one evaluation core: training, the command line and tables all score through it."""

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from lra.attention.core import Terms
from lra.attention.visibility import Array
from lra.data import Batch, Corpus
from lra.errors import UserError
from lra.evaluation.breakdown import Breakdown
from lra.evaluation.protocols import Protocol
from lra.evaluation.report import Report
from lra.models import Decoder


def evaluate(
    model: Decoder,
    corpus: Corpus,
    split: str,
    protocol: Protocol,
    *,
    key: Array | None = None,
    limit: int | None = None,
    step: int | None = None,
    weights: str = "last",
    breakdown: Breakdown | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Scores a split, every token once, with dropout off. The same model and shapes compile once in a process.

    Args:
        model: the decoder.
        corpus: where the tokens come from.
        split: "train", "valid" or "test".
        protocol: in which context each token is scored.
        key: random key for patterns that draw at random, the same for every batch: make it of the run's seed alone.
        limit: scores the first `limit` tokens only and marks the report as partial; None for all.
        step: the model's training step, for the report.
        weights: what the model's parameters are, for the report: "last", or "ema" for their moving average.
        breakdown: collects what stands beside the score, from the same pass.
        progress: called after each batch with the tokens scored so far and in all.

    Raises:
        UserError: model, corpus and protocol don't fit, or a limit below 1.
        FloatingPointError: the model gives no finite score.
    """
    if limit is not None and limit < 1:
        raise UserError(f"the limit is {limit} tokens, but must be at least 1: raise it, or leave it out to score all")
    protocol.check(model)
    vocabulary = corpus.vocabulary
    if vocabulary.size > model.vocabulary_size:
        raise UserError(
            f"corpus {corpus.name} has {vocabulary.size} ids, but the model knows {model.vocabulary_size}: "
            "evaluate it on the corpus that it was trained on"
        )
    began = time.perf_counter()
    tokens = corpus.tokens(split)
    expected = int(tokens.size)
    tokens = tokens[:limit]
    memory = model.initial_memory(protocol.batch_size, train=False, length=protocol.memory_length)
    slots = _slots(model, memory)
    context = f"{protocol.context(slots)}; id {vocabulary.start} stands before the first token"
    if breakdown is not None:
        breakdown.check(model, protocol.segment + (slots or 0))
    total, scored = 0.0, 0
    batches = _checked(protocol.batches(tokens, vocabulary.start), model)
    for batch, nats, metrics in _scores(model, memory, batches, key, breakdown):
        known = nats[batch.weights > 0]  # without padding
        total += float(known.sum(dtype=np.float64))
        scored += known.size
        if not np.isfinite(total):
            raise FloatingPointError(f"the model's score of {corpus.name} {split} is {total} after {scored} tokens")
        if breakdown is not None:
            breakdown.add(batch, nats, metrics)
        if progress is not None:
            progress(scored, int(tokens.size))
    return Report(
        corpus=corpus.name,
        corpus_description=corpus.description,
        split=split,
        tokenisation=f"{vocabulary.name} ({vocabulary.size} ids)",
        protocol=protocol.describe(),
        context=context,
        tokens_scored=scored,
        tokens_expected=expected,
        bytes=vocabulary.num_bytes(tokens),
        nats_total=total,
        partial=tokens.size < expected,
        seconds=time.perf_counter() - began,
        step=step,
        weights=weights,
    )


def _scores(
    model: Decoder, memory: Any, batches: Iterable[Batch], key: Array | None, breakdown: Breakdown | None
) -> Iterator[tuple[Batch, np.ndarray, Mapping[str, Array]]]:
    """Each batch with the nats of its targets [B, T] and the metrics asked for; the device is one batch ahead."""
    graph, state = nnx.split(model)
    names = () if breakdown is None else breakdown.metrics
    memory = jax.device_put(memory, _replicated(state))
    pending: tuple[Batch, Array, Mapping[str, Array]] | None = None
    for batch in batches:
        valid = batch.weights > 0
        probes = () if breakdown is None else breakdown.probes(batch)
        nats, metrics, memory = _step(
            graph, names, state, memory, batch.inputs, batch.targets, valid, batch.reset, key, probes
        )
        if pending is not None:
            yield pending[0], np.asarray(pending[1]), pending[2]
        pending = batch, nats, metrics
    if pending is not None:
        yield pending[0], np.asarray(pending[1]), pending[2]


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _step(
    graph: Any, names: tuple[str, ...], state: Any, memory: Any, inputs: Array, targets: Array, valid: Array,
    reset: Array, key: Array | None, probes: Terms,
) -> tuple[Array, Mapping[str, Array], Any]:  # fmt: skip
    model: Decoder = nnx.merge(graph, state)
    memory = model.reset_memory(memory, reset)
    scored = model.score(inputs, targets, valid=valid, memory=memory, key=key, probes=probes)
    return scored.nats, {name: scored.metrics[name] for name in names}, scored.memory


def _checked(batches: Iterable[Batch], model: Decoder) -> Iterator[Batch]:
    """The same batches; an id out of range would be clamped silently on the device."""
    for batch in batches:
        for ids in (batch.inputs, batch.targets):
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= model.vocabulary_size:
                raise UserError(
                    f"the split has ids from {low} to {high}, but the model knows 0 to {model.vocabulary_size - 1}: "
                    "evaluate it on the corpus that it was trained on"
                )
        yield batch


def _replicated(state: Any) -> jax.sharding.Sharding:
    """Every device of the parameters: memory that lay elsewhere before the first step would compile that step apart."""
    sharding: jax.sharding.Sharding = jax.tree.leaves(state)[0].sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return sharding


def _slots(model: Decoder, memory: Any) -> int | None:
    """How many slots of memory stand before a segment."""
    if memory is None:
        return None
    _, filled = jax.eval_shape(jax.vmap(model.stack.layers[0].memory.read), memory[0])
    return int(filled.shape[-1])
