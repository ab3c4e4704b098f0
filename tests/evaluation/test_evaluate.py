"""The evaluation core against plain loops, and what a score may not depend on."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import Strided
from lra.data import Batch
from lra.errors import UserError
from lra.evaluation import Block, Carried, Protocol, Report, Rows, Sliding, evaluate
from lra.models import Decoder, LearnedPositions

Make = Callable[..., Decoder]


class Counting(Decoder):
    """Counts how often `score` is traced, hence compiled."""

    traced = 0

    def score(self, *args: Any, **kwargs: Any) -> Any:
        type(self).traced += 1
        return super().score(*args, **kwargs)


class Altered(Protocol):
    """A protocol whose batches are altered on their way."""

    name = "altered"

    def __init__(self, inner: Protocol, alter: Callable[[Batch], Batch]) -> None:
        super().__init__(inner.segment, inner.batch_size, inner.memory_length)
        self.inner, self.alter = inner, alter

    def describe(self) -> str:
        return self.inner.describe()

    def context(self, memory: str | None) -> str:
        return self.inner.context(memory)

    def rows(self, size: int, documents: np.ndarray | None = None) -> Rows:
        return self.inner.rows(size, documents)

    def batches(self, *read: Any) -> Iterator[Batch]:
        return map(self.alter, self.inner.batches(*read))


def nats(model: Decoder, corpus: Any, protocol: Protocol, **options: Any) -> float:
    return evaluate(model, corpus, "test", protocol, **options).nats_total


def log_softmax(logits: Any) -> np.ndarray:
    wide = np.asarray(logits, np.float64)
    return wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()


def test_block_scores_token_by_token(make_model: Make, make_corpus: Any, rng: np.random.Generator) -> None:
    """Each token from those before it in its window, by a forward pass that ends there."""
    model, tokens = make_model(), rng.integers(0, 11, 11)
    read = np.concatenate([[3], tokens]).astype(np.int32)
    forward = nnx.jit(lambda model, read: model(read)[0][0, -1])
    expected = -sum(log_softmax(forward(model, read[None, n - n % 3 : n + 1]))[tokens[n]] for n in range(11))
    report = evaluate(model, make_corpus(tokens), "test", Block(segment=3, batch_size=3))
    assert report.nats_total == pytest.approx(expected, rel=1e-6)


def test_carried_scores_segment_by_segment(make_model: Make, corpus: Any) -> None:
    """Each stream alone, without padding and validity: 101 tokens in 5 streams of 21, 20, 20, 20, 20."""
    model, read = make_model(memory=5), np.concatenate([[3], corpus.tokens("test")]).astype(np.int32)
    segment = nnx.jit(lambda model, row, memory: model.score(row[:, :-1], row[:, 1:], memory=memory))
    expected = 0.0
    for begin, end in ((0, 21), (21, 41), (41, 61), (61, 81), (81, 101)):
        memory = model.initial_memory(1, train=False)
        for at in range(begin, end, 7):
            scored = segment(model, read[None, at : min(at + 7, end) + 1], memory)
            memory = scored.memory
            expected += float(np.asarray(scored.nats, np.float64).sum())
    report = evaluate(model, corpus, "test", Carried(streams=5, segment=7))
    assert report.nats_total == pytest.approx(expected, rel=1e-6)
    assert "5 tokens of memory carried (trained with 2 tokens of memory)" in report.context


def test_the_batch_size_changes_nothing(make_model: Make, corpus: Any) -> None:
    for make, model in (
        (lambda batch_size: Block(segment=7, batch_size=batch_size), make_model()),
        (lambda batch_size: Sliding(window=7, stride=3, batch_size=batch_size), make_model()),
        (lambda batch_size: Carried(streams=7, segment=5, batch_size=batch_size), make_model(memory=13)),
    ):
        reports = [evaluate(model, corpus, "test", make(batch_size)) for batch_size in (1, 3, 7)]
        assert {report.tokens_scored for report in reports} == {101}
        for report in reports[1:]:
            assert report.nats_per_token == pytest.approx(reports[0].nats_per_token, abs=1e-6)


def test_memory_length_is_the_models_unless_given(make_model: Make, corpus: Any) -> None:
    short, long = make_model(memory=5), make_model(memory=17)
    own = evaluate(short, corpus, "test", Carried(streams=2, segment=7))
    given = evaluate(long, corpus, "test", Carried(streams=2, segment=7, memory_length=5))
    assert given.nats_total == own.nats_total
    assert given.context == own.context
    assert abs(nats(long, corpus, Carried(streams=2, segment=7)) - own.nats_total) > 0.1


def test_documents_are_scored_as_if_each_stood_alone(make_model: Make, make_corpus: Any, corpus: Any) -> None:
    """Also a part of them; streams over all of the text differ, since memory passes from document to document."""
    model, starts, tokens = make_model(memory=5), np.asarray([0, 20, 27, 30]), corpus.tokens("test")
    corpus.document_starts = lambda split: starts
    pieces = np.split(tokens, starts[1:])
    alone = [nats(model, make_corpus(piece), Carried(streams=1, segment=7)) for piece in pieces]
    for batch_size in (1, 3):
        protocol = Carried(streams="documents", segment=7, batch_size=batch_size)
        report = evaluate(model, corpus, "test", protocol)
        assert report.tokens_scored == 101
        assert report.nats_total == pytest.approx(sum(alone), abs=1e-4)
        assert nats(model, corpus, protocol, limit=27) == pytest.approx(sum(alone[:2]), abs=1e-4)
    assert report.protocol == "carried, each document a stream, segment 7, memory length the model's, batch size 3"
    assert report.context.endswith(
        "5 tokens of memory carried (trained with 2 tokens of memory); memory starts empty in each document; "
        "id 3 stands before the first token of each document"
    )
    assert abs(nats(model, corpus, Carried(streams=1, segment=7)) - sum(alone)) > 0.1


def test_attention_length_makes_all_tokens_read_as_far(make_model: Make, corpus: Any) -> None:
    """Whatever the segment; without it, a token reads all of the memory and its segment so far."""
    model = make_model(memory=7)
    nats = {
        (segment, length): evaluate(
            model, corpus, "test", Carried(streams=1, segment=segment, attention_length=length)
        ).nats_total
        for segment in (4, 9)
        for length in (3, 7, None)
    }
    for length in (3, 7):
        assert nats[4, length] == pytest.approx(nats[9, length], rel=1e-5)
    assert nats[4, None] != pytest.approx(nats[9, None], rel=1e-5)
    assert nats[4, 3] != pytest.approx(nats[4, 7], rel=1e-4)
    protocol = Carried(streams=1, segment=4, attention_length=3, clamp_length=2)
    assert protocol.describe().endswith("batch size 1, attention length 3, clamp length 2")


def test_what_the_model_cannot_be_evaluated_with(make_model: Make, corpus: Any) -> None:
    strided = make_model(memory=7, pattern=functools.partial(Strided, stride=3))
    for model, options, message in (
        (make_model(memory=7), {"clamp_length": 2}, "no term of the model has such a bound"),
        (strided, {"attention_length": 2}, "Strided cannot be limited to the last 2 keys"),
    ):
        with pytest.raises(UserError, match=message):
            evaluate(model, corpus, "test", Carried(streams=1, segment=4, **options))


def test_memory_starts_empty_in_each_window(make_model: Make, corpus: Any) -> None:
    assert nats(make_model(memory=5), corpus, Block(segment=7, batch_size=2)) == pytest.approx(
        nats(make_model(), corpus, Block(segment=7, batch_size=2)), rel=1e-6
    )


def test_windows_are_independent(make_model: Make, make_corpus: Any, rng: np.random.Generator) -> None:
    """Windows that begin after the same token score the same in any order (U53, U54, U106)."""
    model, windows = make_model(memory=5), rng.integers(0, 11, (4, 7))
    windows[:, -1] = 3
    for order in ((3, 1, 0, 2), (0, 1, 0, 2)):
        one_by_one = sum(nats(model, make_corpus(windows[i]), Block(segment=7, batch_size=3)) for i in order)
        together = nats(model, make_corpus(windows[list(order)].ravel()), Block(segment=7, batch_size=3))
        assert together == pytest.approx(one_by_one, rel=1e-6)


@pytest.mark.parametrize("carried", [False, True])
def test_padding_changes_nothing(make_model: Make, corpus: Any, carried: bool) -> None:
    protocol: Protocol = Carried(streams=5, segment=7, batch_size=2) if carried else Block(segment=7, batch_size=4)
    model = make_model(memory=9)
    padded = 0

    def poison(batch: Batch) -> Batch:
        nonlocal padded
        padding = batch.weights == 0
        padded += int(padding.sum())
        return dataclasses.replace(
            batch, inputs=np.where(padding, 10, batch.inputs), targets=np.where(padding, 9, batch.targets)
        )

    report = evaluate(model, corpus, "test", Altered(protocol, poison))
    assert padded
    assert report.nats_total == nats(model, corpus, protocol)
    assert report.tokens_scored == 101


def test_a_token_changes_the_scores_from_it_on(make_model: Make, make_corpus: Any, rng: np.random.Generator) -> None:
    """With one stream every earlier token matters, and no later one does."""
    model, tokens = make_model(memory=29), rng.integers(0, 11, 23)

    def scores(tokens: np.ndarray) -> np.ndarray:
        totals = [nats(model, make_corpus(tokens), Carried(streams=1, segment=7), limit=n) for n in (11, 12, 23)]
        return np.diff(totals, prepend=0)

    changed = tokens.copy()
    changed[11] = (changed[11] + 1) % 11
    before, after = scores(tokens), scores(changed)
    assert after[0] == before[0]
    assert (np.abs(after - before)[1:] > 1e-3).all()


def test_one_compilation(make_model: Make, corpus: Any, make_corpus: Any) -> None:
    """For all batches, the last short one included, for later calls, other parameters, limits and texts."""
    for memory, protocol in (
        (None, Block(segment=7, batch_size=4)),
        (5, Block(segment=7, batch_size=4)),
        (5, Carried(streams=5, segment=7, batch_size=3)),
    ):
        model = make_model(memory, Counting)
        graph, state = nnx.split(model)
        committed = nnx.merge(graph, jax.device_put(state, jax.devices()[0]))
        Counting.traced = 0
        compiled: list[str] = []
        jax.monitoring.register_event_duration_secs_listener(
            lambda name, *_, fun_name="", compiled=compiled, **__: (
                compiled.append(fun_name) if name.endswith("backend_compile_duration") else None
            )
        )
        try:
            first = nats(committed, corpus, protocol)
            other = nnx.merge(graph, jax.device_put(jax.tree.map(lambda x: x / 2, state), jax.devices()[0]))
            assert nats(committed, corpus, protocol) == first
            assert nats(other, corpus, protocol) != first
            assert nats(committed, corpus, protocol, limit=13) < first
            assert nats(committed, make_corpus(corpus.tokens("test")[:53]), protocol) < first
        finally:
            jax.monitoring.clear_event_listeners()
        assert Counting.traced == 1
        assert compiled.count("jit(_step)") == 1


def test_dropout_is_off_and_the_key_is_passed(make_model: Make, corpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = make_model(kind=Keyed, dropout=0.5)
    protocol, key = Block(segment=7, batch_size=4), jax.random.key(5)
    plain = nats(make_model(), corpus, protocol)
    assert nats(dropped, corpus, protocol) == plain
    drawn = nats(dropped, corpus, protocol, key=key)
    assert drawn != plain
    assert drawn == nats(dropped, corpus, protocol, key=key)
    assert drawn == pytest.approx(nats(dropped, corpus, Block(segment=7, batch_size=3), key=key), rel=1e-6)


class Keyed(Decoder):
    """Adds a random number of nats to each token of a segment."""

    def score(self, tokens: Any, targets: Any, *, key: Any = None, **options: Any) -> Any:
        scored = super().score(tokens, targets, key=key, **options)
        if key is None:
            return scored
        return dataclasses.replace(scored, nats=scored.nats + jax.random.uniform(key, tokens.shape[1:]))


def test_the_report_says_what_was_scored(make_model: Make, corpus: Any) -> None:
    report = evaluate(make_model(), corpus, "test", Block(segment=7), step=19)
    assert isinstance(report, Report)
    assert (report.tokens_scored, report.tokens_expected, report.partial) == (101, 101, False)
    assert report.bytes == corpus.num_bytes("test")
    assert report.characters == corpus.num_characters("test")
    assert report.words == 53
    assert (report.corpus, report.corpus_description, report.split) == ("toy", "toy, digest 0123", "test")
    assert (report.tokenisation, report.protocol) == ("toy (11 ids)", "block, segment 7, batch size 16")
    assert "id 3 stands before the first token" in report.context
    assert (report.step, report.seconds > 0) == (19, True)


@pytest.mark.parametrize("protocol", [Block(segment=7, batch_size=3), Carried(streams=2, segment=7)])
def test_a_limit_scores_the_first_tokens(make_model: Make, make_corpus: Any, corpus: Any, protocol: Protocol) -> None:
    head = make_corpus(corpus.tokens("test")[:31])
    report = evaluate(make_model(), corpus, "test", protocol, limit=31)
    assert (report.tokens_scored, report.tokens_expected, report.partial) == (31, 101, True)
    assert report.nats_total == nats(make_model(), head, protocol)
    assert report.bytes == head.num_bytes("test") < corpus.num_bytes("test")
    assert report.characters == head.num_characters("test") < corpus.num_characters("test")
    assert report.words is None
    assert not evaluate(make_model(), corpus, "test", protocol, limit=101).partial
    assert evaluate(make_model(), corpus, "test", protocol, limit=1_000).tokens_scored == 101


def test_progress(make_model: Make, corpus: Any) -> None:
    calls: list[tuple[int, int]] = []
    evaluate(make_model(), corpus, "test", Block(segment=7, batch_size=4), progress=lambda *call: calls.append(call))
    assert calls == [(28, 101), (56, 101), (84, 101), (101, 101)]


def test_missing_and_repeated_tokens_raise(make_model: Make, corpus: Any) -> None:
    def drop(batch: Batch) -> Batch:
        return dataclasses.replace(batch, weights=batch.weights * (np.arange(7) > 0))

    with pytest.raises(ValueError, match="of the 101 tokens"):
        evaluate(make_model(), corpus, "test", Altered(Block(segment=7), drop))
    full = Altered(
        Block(segment=7, batch_size=4), lambda batch: dataclasses.replace(batch, weights=batch.weights * 0 + 1)
    )
    with pytest.raises(ValueError, match="112 of the 101 tokens"):
        evaluate(make_model(), corpus, "test", full)


def test_sums_are_float64(make_model: Make, make_corpus: Any, rng: np.random.Generator) -> None:
    """Equal nats of 0.1 (float32): adding 40,000 of them in float32 is off in the fifth digit."""
    corpus = make_corpus(np.zeros(40_003, np.uint8))
    report = evaluate(make_model(kind=Tenth), corpus, "test", Block(segment=1_009, batch_size=1))
    assert report.nats_total == pytest.approx(40_003 * float(np.float32(0.1)), rel=1e-12)


class Tenth(Decoder):
    def score(self, tokens: Any, targets: Any, **options: Any) -> Any:
        scored = super().score(tokens[:, :1], targets[:, :1], valid=options["valid"][:, :1])
        return dataclasses.replace(scored, nats=jnp.full(tokens.shape, 0.1), right=jnp.zeros(tokens.shape, bool))


def test_no_finite_score(make_model: Make, corpus: Any) -> None:
    graph, state = nnx.split(make_model())
    broken = nnx.merge(graph, jax.tree.map(lambda x: x * jnp.nan, state))
    with pytest.raises(FloatingPointError, match="toy test is nan"):
        evaluate(broken, corpus, "test", Block(segment=7))


def test_mistakes(make_model: Make, make_corpus: Any, corpus: Any) -> None:
    with pytest.raises(UserError, match="limit is 0"):
        evaluate(make_model(), corpus, "test", Block(segment=7), limit=0)
    with pytest.raises(UserError, match="memory_length is 5, but the model has no memory"):
        evaluate(make_model(), corpus, "test", Carried(streams=2, segment=7, memory_length=5))
    positions = make_model(position=Positions)
    assert evaluate(positions, corpus, "test", Block(segment=5)).tokens_scored == 101
    for protocol, named in ((Block(segment=7), "Block.segment"), (Sliding(window=7), "Sliding.window")):
        with pytest.raises(UserError, match=f"{named} is 7, but the model has 5 positions"):
            evaluate(positions, corpus, "test", protocol)
    with pytest.raises(UserError, match="ids from 0 to 11, but the model knows 0 to 10"):
        evaluate(make_model(), make_corpus(np.asarray([0, 11])), "test", Block(segment=2, batch_size=1))
    corpus.vocabulary.size = 12
    with pytest.raises(UserError, match="corpus toy has 12 ids, but the model knows 11"):
        evaluate(make_model(), corpus, "test", Block(segment=7))


def Positions(*, width: int, rngs: nnx.Rngs) -> LearnedPositions:  # noqa: N802
    return LearnedPositions(max_length=5, width=width, rngs=rngs)


def test_tokens_that_are_not_scored_are_read(make_model: Make, make_corpus: Any, rng: np.random.Generator) -> None:
    """Only scored ones count, in nats, hits and bytes, and all of them are context; by one forward pass."""
    model, tokens, scored = make_model(), rng.integers(0, 11, 21), rng.random(21) < 0.5
    read = np.concatenate([[3], tokens]).astype(np.int32)
    logits = nnx.jit(lambda model, read: model(read)[0])(model, read[:-1].reshape(3, 7)).reshape(21, 11)
    corpus = make_corpus(tokens)
    corpus.scored = lambda split: scored
    report = evaluate(model, corpus, "test", Block(segment=7, batch_size=2))
    expected = -sum(log_softmax(logits[n])[tokens[n]] for n in np.flatnonzero(scored))
    assert report.nats_total == pytest.approx(expected, rel=1e-6)
    assert report.tokens_right == (np.argmax(logits, -1) == tokens)[scored].sum()
    assert report.tokens_scored == report.tokens_expected == scored.sum()
    assert report.bytes == (tokens[scored] + 1).sum()
    assert report.characters == (tokens[scored] > 0).sum()
    part = evaluate(model, corpus, "test", Block(segment=7, batch_size=2), limit=11)
    assert (part.tokens_scored, part.tokens_expected, part.partial) == (scored[:11].sum(), scored.sum(), True)
    first = int(np.argmax(scored))
    corpus.scored = lambda split: scored & (np.arange(21) > first)
    with pytest.raises(UserError, match=r"none of the first .* tokens of toy test is scored: raise the limit"):
        evaluate(model, corpus, "test", Block(segment=7), limit=first + 1)
