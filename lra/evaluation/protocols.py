"""Protocols: in which context each token of a split is scored. They differ in how the split is cut into rows, alone."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Literal

import numpy as np
from flax import nnx

from lra.data import Batch, Text
from lra.errors import UserError
from lra.models import Decoder


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Rows of consecutive tokens. They may overlap, but score every token of a split once.

    Attributes:
        begins: the first token of each row, [R] integers, ascending.
        scores: the first token that a row scores; those before it are read alone.
        ends: the token behind its last one.
    """

    begins: np.ndarray
    scores: np.ndarray
    ends: np.ndarray

    @classmethod
    def side_by_side(cls, begins: np.ndarray, size: int) -> Rows:
        """Rows that score all that they read, each up to the next one's begin, the last up to the split's size."""
        return cls(begins, begins, np.append(begins[1:], size))

    @property
    def longest_first(self) -> Rows:
        """The same rows by falling length: those of one group are then about as long."""
        order = np.argsort(self.begins - self.ends, kind="stable")
        return Rows(self.begins[order], self.scores[order], self.ends[order])

    def __len__(self) -> int:
        return self.begins.size

    def __getitem__(self, part: slice) -> Rows:
        return Rows(self.begins[part], self.scores[part], self.ends[part])


class Protocol(abc.ABC):
    """Cuts a split into rows of consecutive tokens and reads B rows at a time, segment by segment.

    Every token that the corpus scores is a target of weight 1 once, with the token before it as its input (the
    vocabulary's start id for the very first). Memory, if the model has one, starts empty in each row and is carried
    along it. All batches have one shape: what is missing at the tails of rows, and the rows missing in the last group,
    is padding of weight 0. What one row reads no other row sees, so that scores don't depend on B.

    Attributes:
        name: what `describe` begins with.
        argument: what the constructor calls the segment.
        segment: T, targets of a row that are scored at once.
        batch_size: B, rows at a time.
        memory_length: tokens remembered between segments; None for the model's own evaluation length.
        documents: whether each document of the corpus is a row, which begins behind the start id.
    """

    name: ClassVar[str]
    argument: ClassVar[str] = "segment"
    documents = False

    def __init__(self, segment: int, batch_size: int, memory_length: int | None = None) -> None:
        self.segment, self.batch_size, self.memory_length = segment, batch_size, memory_length

    @abc.abstractmethod
    def describe(self) -> str:
        """The protocol with all its numbers, in one line of a fixed form."""

    @abc.abstractmethod
    def context(self, memory: str | None) -> str:
        """What a token is scored from, for a model that carries this memory (None: without memory)."""

    @abc.abstractmethod
    def rows(self, size: int, documents: np.ndarray | None = None) -> Rows:
        """The rows of `size` tokens; raises `UserError` for too few tokens.

        `documents` says where those of the corpus begin, for protocols that need to know.
        """

    def check(self, model: Decoder) -> None:
        """Raises `UserError` where the model cannot be evaluated so."""
        positions = None if model.position is None else model.position.max_length
        if positions is not None and self.segment > positions:
            raise UserError(
                f"{type(self).__name__}.{self.argument} is {self.segment}, but the model has {positions} positions: "
                f"set it to at most {positions}"
            )
        memory = model.stack.layers[0].memory
        if memory is not None:
            memory.check(self.segment)
        elif self.memory_length is not None:
            raise UserError(
                f"{type(self).__name__}.memory_length is {self.memory_length}, but the model has no memory: "
                "leave it out or choose a model with Decoder.memory"
            )

    def adapt(self, model: Decoder) -> Decoder:
        """The model as it is evaluated; raises `UserError` where it has no such form."""
        return model

    def batches(
        self, tokens: np.ndarray, start: int, scored: np.ndarray | None = None, documents: np.ndarray | None = None
    ) -> Iterator[Batch]:
        """Yields the split's batches, each made when it is asked for.

        Args:
            tokens: [N] integers, read piece by piece, so that it may be memory-mapped.
            start: the id before the first token.
            scored: which tokens count, [N] booleans (`Corpus.scored`); None for all.
            documents: where documents begin (`Corpus.document_starts`), for a protocol with `documents`.
        """
        text = Text(tokens, start, scored, documents)
        rows = self.rows(tokens.size, documents).longest_first
        for first in range(0, len(rows), self.batch_size):
            group = rows[first : first + self.batch_size]
            longest = int((group.ends - group.begins).max())
            for offset in range(0, longest, self.segment):
                yield self._batch(text, group, offset)

    def _batch(self, text: Text, group: Rows, offset: int) -> Batch:
        """What B rows read from so many tokens after their begins on."""
        shape = (self.batch_size, self.segment)
        inputs, targets, weights = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        valid = np.zeros(shape, bool)
        begins = (group.begins + offset).tolist()
        for row, (begin, score, end) in enumerate(zip(begins, group.scores.tolist(), group.ends.tolist(), strict=True)):
            length = min(self.segment, end - begin)
            if length <= 0:
                continue
            inputs[row, :length], targets[row, :length], weights[row, :length] = text.rows(begin, begin + length)
            weights[row, : max(score - begin, 0)] = 0
            valid[row, :length] = True
        return Batch(inputs, targets, weights, np.full(self.batch_size, offset == 0), valid)


class Block(Protocol):
    """Windows that do not overlap, each with fresh context: a token reads the tokens before it in its window, alone.

    Args:
        segment: targets of a window T; the split's last window may be shorter.
        batch_size: windows at a time B; the score does not depend on it.

    Raises:
        UserError: a number below 1.
    """

    name = "block"

    def __init__(self, *, segment: int, batch_size: int = 16) -> None:
        _check(self, segment=segment, batch_size=batch_size)
        super().__init__(segment, batch_size)

    def describe(self) -> str:
        return f"block, segment {self.segment}, batch size {self.batch_size}"

    def context(self, memory: str | None) -> str:
        begin = "" if memory is None else "; memory starts empty in each"
        return f"windows of {self.segment} tokens, each read from the token before it on{begin}"

    def rows(self, size: int, documents: np.ndarray | None = None) -> Rows:
        return Rows.side_by_side(np.arange(0, size, self.segment), size)


class Sliding(Protocol):
    """Windows that overlap, each with fresh context, so that few tokens are scored from little context.

    A window begins every `stride` tokens. The first one scores all its tokens, every later one those that no window
    before it has scored: its last `stride`, or fewer at the end of the split. So token n >= window is scored from at
    least window - stride + 1 tokens and at most window, and the model reads each token window / stride times.

    With stride = 1 it is the protocol of Al-Rfou et al. 2018 (arXiv:1808.04444), in which each token is the last of a
    window of its own; with window = 32256 and stride = 512 that of Longformer (Beltagy et al. 2020, arXiv:2004.05150);
    with stride = window it is `Block`.

    Args:
        window: tokens of a window T.
        stride: tokens from one window's begin to the next one's, at most window; None for a quarter of it.
        batch_size: windows at a time B; the score does not depend on it.

    Raises:
        UserError: a number below 1, or a stride above the window.

    Example:
        >>> import numpy as np
        >>> from lra.evaluation import Sliding
        >>> rows = Sliding(window=4, stride=3).rows(9)
        >>> [list(range(*row)) for row in zip(rows.scores, rows.ends)]
        [[0, 1, 2, 3], [4, 5, 6], [7, 8]]
    """

    name = "sliding"
    argument = "window"

    def __init__(self, *, window: int, stride: int | None = None, batch_size: int = 16) -> None:
        _check(self, window=window, batch_size=batch_size)
        self.stride = max(window // 4, 1) if stride is None else stride
        _check(self, stride=self.stride)
        if self.stride > window:
            raise UserError(
                f"Sliding.stride is {stride}, so that windows of {window} tokens would leave some out: "
                f"set it to at most {window}, or raise Sliding.window"
            )
        super().__init__(window, batch_size)

    def describe(self) -> str:
        return f"sliding, window {self.segment}, stride {self.stride}, batch size {self.batch_size}"

    def context(self, memory: str | None) -> str:
        begin = "" if memory is None else "; memory starts empty in each"
        return (
            f"windows of {self.segment} tokens, one every {self.stride}, each read from the token before it on; the "
            f"first scores all its tokens, from 1 token on, the others their last {self.stride}, from "
            f"{self.segment - self.stride + 1} to {self.segment} tokens{begin}"
        )

    def rows(self, size: int, documents: np.ndarray | None = None) -> Rows:
        begins = np.arange(0, max(size - self.segment + self.stride, 1), self.stride)
        ends = np.minimum(begins + self.segment, size)
        return Rows(begins, np.append(0, ends[:-1]), ends)


class Carried(Protocol):
    """Streams that go on segment by segment with memory carried (Dai et al. 2019, arXiv:1901.02860, section 3.2).

    The split is cut into contiguous streams whose lengths differ by one token at most, the longer ones first. The first
    input of a stream is the token before it, and its memory starts empty: fewer streams give more context.

    Args:
        streams: number of streams; or "documents": each document is one, behind the start id, so that nothing of one
            document is read in another.
        segment: targets of a stream that are scored at once T.
        memory_length: tokens remembered; None for the model's own evaluation length.
        batch_size: streams at a time B; None for all (16 documents). The score does not depend on it.
        attention_length: keys that every token reads at most, its own included; None for all that there are. This is
            `same_length` of the released code: memory_length in its PyTorch half, memory_length + 1 in TensorFlow's.
        clamp_length: distances beyond this count as this, for terms that have such a bound; None for the model's own.

    Raises:
        UserError: a number below 1, or a batch size above the number of streams.
    """

    name = "carried"

    def __init__(
        self,
        *,
        streams: int | Literal["documents"],
        segment: int,
        memory_length: int | None = None,
        batch_size: int | None = None,
        attention_length: int | None = None,
        clamp_length: int | None = None,
    ) -> None:
        number = None if streams == "documents" else streams
        if number is not None:
            _check(self, streams=number)
        batch_size = (number or 16) if batch_size is None else batch_size
        _check(self, segment=segment, batch_size=batch_size)
        optional = {"memory_length": memory_length, "attention_length": attention_length, "clamp_length": clamp_length}
        _check(self, **{name: value for name, value in optional.items() if value is not None})
        if number is not None and batch_size > number:
            raise UserError(
                f"Carried.batch_size is {batch_size}, but there are {streams} streams to read at a time: "
                f"set it to at most {streams}, or raise Carried.streams"
            )
        super().__init__(segment, batch_size, memory_length)
        self.streams, self.documents = number, number is None
        self.attention_length, self.clamp_length = attention_length, clamp_length

    def describe(self) -> str:
        memory = "the model's" if self.memory_length is None else self.memory_length
        streams = "each document a stream" if self.streams is None else f"streams {self.streams}"
        sizes = f"{streams}, segment {self.segment}, memory length {memory}, batch size {self.batch_size}"
        options = {"attention length": self.attention_length, "clamp length": self.clamp_length}
        return ", ".join([f"carried, {sizes}", *(f"{name} {x}" for name, x in options.items() if x is not None)])

    def adapt(self, model: Decoder) -> Decoder:
        if self.attention_length is None and self.clamp_length is None:
            return model
        model = nnx.merge(*nnx.split(model))  # another object with the same arrays
        if self.clamp_length is not None:
            clamped = [term for term in model.terms if hasattr(term, "clamp_length")]
            if not clamped:
                raise UserError(
                    f"Carried.clamp_length is {self.clamp_length}, but no term of the model has such a bound: leave it "
                    "out or use XLRelative"
                )
            for term in clamped:
                term.clamp_length = self.clamp_length
        if self.attention_length is not None:
            for layer in model.stack.layers:
                try:
                    layer.attention.pattern = layer.attention.pattern.limited(self.attention_length)
                except ValueError as error:
                    raise UserError(str(error)) from error
        return model

    def context(self, memory: str | None) -> str:
        rest = "nothing carried (the model has no memory)" if memory is None else memory
        begin = "; memory starts empty in each document" * (self.documents and memory is not None)
        return f"segments of {self.segment} tokens, each read from the token before it on; {rest}{begin}"

    def rows(self, size: int, documents: np.ndarray | None = None) -> Rows:
        if self.streams is None:
            if documents is None:
                raise ValueError("each document is a stream, but where they begin is not given: give documents")
            return Rows.side_by_side(documents[documents < size], size)
        if size < self.streams:
            raise UserError(
                f"Carried.streams is {self.streams}, but only {size} tokens are scored: set it to at most {size}"
            )
        streams = np.arange(self.streams)
        return Rows.side_by_side(streams * (size // self.streams) + np.minimum(streams, size % self.streams), size)


def _check(protocol: Protocol, **values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(
                f"{type(protocol).__name__}.{name} is {value!r}, but must be an integer of at least 1: change it"
            )
