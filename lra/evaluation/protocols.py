"""Protocols: in which context each token of a split is scored. They differ in how the split is cut into rows, alone."""

import abc
from collections.abc import Iterator
from typing import ClassVar, Literal

import numpy as np
from flax import nnx

from lra.data import Batch, Text
from lra.errors import UserError
from lra.models import Decoder


class Protocol(abc.ABC):
    """Cuts a split into rows of consecutive tokens and reads B rows at a time, segment by segment.

    Every token that the corpus scores is a target once, with the token before it as its input (the vocabulary's start
    id for the very first). Memory, if the model has one, starts empty in each row and is carried along it. All batches
    have one shape: what is missing at the tails of rows, and the rows missing in the last group, are padding of weight
    0. Rows never meet, so that scores don't depend on B.

    Attributes:
        name: what `describe` begins with.
        segment: T, targets of a row that are scored at once.
        batch_size: B, rows at a time.
        memory_length: tokens remembered between segments; None for the model's own evaluation length.
        documents: whether each document of the corpus is a row, which begins behind the start id.
    """

    name: ClassVar[str]
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
    def bounds(self, size: int, documents: np.ndarray | None = None) -> np.ndarray:
        """Where the rows of `size` tokens begin, ascending, and then `size`; raises `UserError` for too few tokens.

        `documents` says where those of the corpus begin, for protocols that need to know.
        """

    def check(self, model: Decoder) -> None:
        """Raises `UserError` where the model cannot be evaluated so."""
        positions = None if model.position is None else model.position.max_length
        if positions is not None and self.segment > positions:
            raise UserError(
                f"{type(self).__name__}.segment is {self.segment}, but the model has {positions} positions: "
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
        bounds = self.bounds(tokens.size, documents)
        longest_first = np.argsort(-np.diff(bounds), kind="stable")  # rows of one group are then about as long
        begins, ends = bounds[:-1][longest_first], bounds[1:][longest_first]
        for first in range(0, begins.size, self.batch_size):
            group = slice(first, first + self.batch_size)
            longest = int((ends[group] - begins[group]).max())
            for offset in range(0, longest, self.segment):
                yield self._batch(text, begins[group] + offset, ends[group], offset == 0)

    def _batch(self, text: Text, begins: np.ndarray, ends: np.ndarray, reset: bool) -> Batch:
        shape = (self.batch_size, self.segment)
        inputs, targets, weights = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        valid = np.zeros(shape, bool)
        for row, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
            length = min(self.segment, end - begin)
            if length <= 0:
                continue
            inputs[row, :length], targets[row, :length], weights[row, :length] = text.rows(begin, begin + length)
            valid[row, :length] = True
        return Batch(inputs, targets, weights, np.full(self.batch_size, reset), valid)


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

    def bounds(self, size: int, documents: np.ndarray | None = None) -> np.ndarray:
        return np.append(np.arange(0, size, self.segment), size)


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

    def bounds(self, size: int, documents: np.ndarray | None = None) -> np.ndarray:
        if self.streams is None:
            if documents is None:
                raise ValueError("each document is a stream, but where they begin is not given: give documents")
            return np.append(documents[documents < size], size)
        if size < self.streams:
            raise UserError(
                f"Carried.streams is {self.streams}, but only {size} tokens are scored: set it to at most {size}"
            )
        rows = np.arange(self.streams + 1)
        return rows * (size // self.streams) + np.minimum(rows, size % self.streams)


def _check(protocol: Protocol, **values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(
                f"{type(protocol).__name__}.{name} is {value!r}, but must be an integer of at least 1: change it"
            )
