"""The one evaluation core: training, the command line and tables all score through it."""

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from lra.attention.core import Terms
from lra.attention.memory import Remembered
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

    The score depends neither on the protocol's batch size nor on the devices that hold the model. Of several processes
    each one that calls this scores all of the split, with what its own devices hold.

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
    model = protocol.adapt(model)
    vocabulary = corpus.vocabulary
    if vocabulary.size > model.vocabulary_size:
        raise UserError(
            f"corpus {corpus.name} has {vocabulary.size} ids, but the model knows {model.vocabulary_size}: "
            "evaluate it on the corpus that it was trained on"
        )
    began = time.perf_counter()
    tokens, scored = corpus.tokens(split), corpus.scored(split)
    documents = corpus.document_starts(split) if protocol.documents else None
    expected = int(tokens.size if scored is None else scored.sum())
    tokens, scored = tokens[:limit], None if scored is None else scored[:limit]
    counted = tokens if scored is None else tokens[scored]
    if not counted.size:
        raise UserError(f"none of the first {limit} tokens of {corpus.name} {split} is scored: raise the limit")
    model = model.fitted()
    memory = _memory(model, protocol)
    past = _past(model, memory)
    context = protocol.context(_remembered(model, protocol.memory_length)) + _short(model, past)
    if breakdown is not None:
        breakdown.begin(model, corpus, protocol, reach(model, protocol))
    total, done, right = 0.0, 0, 0
    batches = _checked(protocol.batches(tokens, vocabulary.start, scored, documents), model)
    for batch, nats, hits, metrics in _scores(model, memory, batches, key, breakdown):
        counts = batch.weights > 0
        total += float(nats[counts].sum(dtype=np.float64))
        done, right = done + int(counts.sum()), right + int(hits[counts].sum())
        if not np.isfinite(total):
            raise FloatingPointError(f"the model's score of {corpus.name} {split} is {total} after {done} tokens")
        if breakdown is not None:
            breakdown.add(batch, nats, metrics)
        if progress is not None:
            progress(done, int(counted.size))
    partial = counted.size < expected
    return Report(
        corpus=corpus.name,
        corpus_description=corpus.description,
        split=split,
        tokenisation=vocabulary.description,
        protocol=protocol.describe(),
        context=f"{context}; id {vocabulary.start} stands before the first token"
        + " of each document" * protocol.documents,
        tokens_scored=done,
        tokens_expected=expected,
        tokens_right=right,
        bytes=corpus.num_bytes(split, limit) if scored is None else vocabulary.num_bytes(counted),
        characters=corpus.num_characters(split, limit) if scored is None else vocabulary.num_characters(counted),
        words=None if partial else corpus.num_words(split),
        nats_total=total,
        partial=partial,
        seconds=time.perf_counter() - began,
        step=step,
        weights=weights,
        causality=model.stack.causality,
    )


def reach(model: Decoder, protocol: Protocol) -> int:
    """Tokens that a query may read in a protocol: its segment's, and those that the slots of memory before it span."""
    past = _past(model, jax.eval_shape(lambda: _memory(model, protocol)))
    return protocol.segment + (0 if past is None else past.span)


def _memory(model: Decoder, protocol: Protocol) -> Any:
    return model.initial_memory(protocol.batch_size, train=False, length=protocol.memory_length)


def _scores(
    model: Decoder, memory: Any, batches: Iterable[Batch], key: Array | None, breakdown: Breakdown | None
) -> Iterator[tuple[Batch, np.ndarray, np.ndarray, Mapping[str, Array]]]:
    """Each batch with the nats of its targets [B, T], which were predicted, and the metrics asked for.

    The device is one batch ahead of the host.
    """
    graph, state = nnx.split(model)
    names = () if breakdown is None else breakdown.metrics
    memory = jax.device_put(memory, _replicated(state))
    pending: tuple[Batch, Array, Array, Mapping[str, Array]] | None = None
    for batch in batches:
        probes = () if breakdown is None else breakdown.probes(batch)
        *found, memory = _step(
            graph,
            names,
            state,
            memory,
            batch.inputs,
            batch.targets,
            batch.valid,
            batch.weights > 0,
            batch.reset,
            key,
            probes,
        )
        if pending is not None:
            yield _fetched(*pending)
        pending = batch, *found
    if pending is not None:
        yield _fetched(*pending)


def _fetched(
    batch: Batch, nats: Array, right: Array, metrics: Mapping[str, Array]
) -> tuple[Batch, np.ndarray, np.ndarray, Mapping[str, Array]]:
    return batch, np.asarray(nats), np.asarray(right), metrics


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _step(
    graph: Any, names: tuple[str, ...], state: Any, memory: Any, inputs: Array, targets: Array, valid: Array,
    counted: Array, reset: Array, key: Array | None, probes: Terms,
) -> tuple[Array, Array, Mapping[str, Array], Any]:  # fmt: skip
    model: Decoder = nnx.merge(graph, state)
    memory = model.reset_memory(memory, reset)
    scored = model.score(inputs, targets, valid=valid, memory=memory, key=key, probes=probes, scored=counted)
    return scored.nats, scored.right, {name: scored.metrics[name] for name in names}, scored.memory


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


def _remembered(model: Decoder, length: int | None) -> str | None:
    """What the model remembers, and what it did in training if that was something else."""
    memory = model.stack.layers[0].memory
    if memory is None:
        return None
    now, before = memory.describe(False, length), memory.describe(True)
    return f"{now} carried" + f" (trained with {before})" * (now != before)


def _past(model: Decoder, memory: Any) -> Remembered | None:
    """The shapes of what stands before a segment."""
    if memory is None:
        return None
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), memory[0])
    past: Remembered = jax.eval_shape(model.stack.layers[0].memory.read, first)
    return past


def _short(model: Decoder, past: Remembered | None) -> str:
    """What the report says of a memory that holds less than attention would read."""
    reach = [layer.attention.pattern.reach for layer in model.stack.layers]
    known = [each for each in reach if each is not None]
    if past is None or not known or max(known) <= past.span:
        return ""
    return f", though attention reaches {max(known)} tokens back"
