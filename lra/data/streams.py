"""Training batches: the two orders in which a token array is read, through grain, with a position that can be saved."""

import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import grain
import numpy as np

from lra.errors import UserError


@dataclass(frozen=True, eq=False)
class Batch:
    """B rows of T tokens, on the host.

    Attributes:
        inputs: [B, T] int32, the token before each target.
        targets: [B, T] int32.
        weights: [B, T] float32, 0 where a target is not scored.
        reset: [B] bool, True where a row begins anew, so that its memory must be cleared.
        valid: [B, T] bool, False for padding, which nobody reads; None stands for all that is scored.
    """

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    reset: np.ndarray
    valid: np.ndarray = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.valid is None:
            object.__setattr__(self, "valid", self.weights > 0)


@dataclass(frozen=True, eq=False)
class Text:
    """Tokens, and which of them are targets.

    Attributes:
        tokens: [N] integers.
        start: the id before the first token (`Vocabulary.start`).
        scored: [N] booleans; None for all.
        documents: the tokens at which documents begin, which are to be kept apart; None for one text.
    """

    tokens: np.ndarray
    start: int
    scored: np.ndarray | None = None
    documents: np.ndarray | None = None

    def rows(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Inputs, targets and weights of tokens begin..end-1, [T] each."""
        targets = np.asarray(self.tokens[begin:end], np.int32)
        first = begin == 0 or (self.documents is not None and begin in self.documents)
        before = self.start if first else self.tokens[begin - 1]
        inputs = np.concatenate([np.asarray([before], np.int32), targets[:-1]])
        return inputs, targets, self.weights(begin, end)

    def weights(self, begin: int, end: int) -> np.ndarray:
        """[T] float32, 1 for targets."""
        return np.ones(end - begin, np.float32) if self.scored is None else self.scored[begin:end].astype(np.float32)


class BatchIterator(Iterator[Batch]):
    """An infinite iterator of batches that knows how to continue.

    The state is a small JSON object: the order it belongs to, and the position after the last batch that the caller
    took (what is prefetched does not count). It depends on no host, so that a run may continue on other hosts.
    """

    def __init__(self, dataset: grain.MapDataset, order: dict[str, Any], prefetch: int) -> None:
        options = grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch)
        self._batches = iter(dataset.to_iter_dataset(options))
        self._order = order

    def __next__(self) -> Batch:
        batch: Batch = next(self._batches)
        return batch

    def get_state(self) -> dict[str, Any]:
        """Returns what `set_state` needs to continue after the last batch taken."""
        return {"order": dict(self._order), "position": self._batches.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues where the iterator stood whose `get_state` gave the state.

        Raises:
            UserError: the state belongs to another order (other tokens, sizes or seed).
        """
        if state["order"] != self._order:
            raise UserError(
                f"the saved data position belongs to {state['order']}, but this run reads {self._order}: "
                "restore the former settings or start a new run"
            )
        self._batches.set_state(state["position"])


class Batches(abc.ABC):
    """How a token array becomes training batches; `Streams` and `Windows` differ in the order alone.

    Token n is a target with token n - 1 as its input; the input of the first token is the vocabulary's start id.

    Args:
        batch_size: rows of a batch B, over all hosts.
        segment: tokens of a row T.
    """

    carries: ClassVar[bool]
    """Whether a row goes on in the next batch, as memory needs it."""
    documents = False
    """Whether it needs to know where documents begin."""

    def __init__(self, batch_size: int, segment: int) -> None:
        for name, value in (("batch_size", batch_size), ("segment", segment)):
            if not isinstance(value, int) or value < 1:
                raise UserError(
                    f"{type(self).__name__}.{name} is {value!r}, but must be an integer of at least 1: change it"
                )
        self.batch_size = batch_size
        self.segment = segment

    @abc.abstractmethod
    def epoch_length(self, tokens: np.ndarray, documents: np.ndarray | None = None) -> int:
        """Returns the batches of an epoch; raises `UserError` where the tokens don't fill one batch."""

    @abc.abstractmethod
    def _dataset(self, text: Text, seed: int, host: int, hosts: int) -> grain.MapDataset:
        """Returns the endless dataset of one host's rows, in order, not yet batched."""

    def batches(
        self,
        tokens: np.ndarray,
        *,
        start: int,
        seed: int,
        host: int = 0,
        hosts: int = 1,
        prefetch: int = 2,
        scored: np.ndarray | None = None,
        documents: np.ndarray | None = None,
    ) -> BatchIterator:
        """Returns an infinite iterator over one host's part of the batches.

        Args:
            tokens: [N] integers, read piece by piece, so that it may be memory-mapped.
            start: the id before the first token (`Vocabulary.start`).
            seed: orders what is shuffled.
            host: number of this host.
            hosts: number of hosts, a divisor of `batch_size`; each gets batch_size / hosts rows.
            prefetch: batches that a thread reads ahead; 0 for no thread.
            scored: which tokens count as targets, [N] booleans (`Corpus.scored`); None for all.
            documents: where documents begin (`Corpus.document_starts`), if they are to be kept apart.

        Raises:
            UserError: the tokens don't fill one batch, the hosts don't divide it, or the seed is out of range.
        """
        self._check_length(tokens)
        if not 0 <= host < hosts or self.batch_size % hosts:
            raise UserError(
                f"host {host} of {hosts} cannot take an equal part of batch_size {self.batch_size}: "
                "choose a batch_size that is a multiple of the number of hosts"
            )
        if not 0 <= seed < 2**32:
            raise UserError(f"the data seed is {seed}, but it must be in [0, 2**32): choose another")
        rows = self._dataset(Text(tokens, start, scored, documents), seed, host, hosts)
        dataset = rows.batch(self.batch_size // hosts, drop_remainder=True).map(lambda parts: Batch(**parts))
        order = {"scheme": type(self).__name__, "batch_size": self.batch_size, "segment": self.segment}
        if documents is not None:
            order["documents"] = int(documents.size)
        return BatchIterator(dataset, {**order, "seed": seed, "tokens": int(tokens.size)}, prefetch)

    def _check_length(self, tokens: np.ndarray) -> None:
        if tokens.ndim != 1:
            raise ValueError(f"tokens must be a 1-D array, but have shape {tokens.shape}: flatten them")
        needed = self.batch_size * self.segment
        if tokens.size < needed:
            raise UserError(
                f"the split has {tokens.size} tokens, but one batch of batch_size {self.batch_size} and segment "
                f"{self.segment} needs {needed}: lower either or choose a longer text"
            )


class Streams(Batches):
    """Rows that go on: each row reads its own contiguous part of the tokens and continues in the next batch.

    Memory may therefore be carried from batch to batch. Row b's part is the b-th of B equal ones of whole segments; the
    last N mod (B T) tokens of the corpus are dropped. In the first batch of an epoch all rows start again and `reset`
    is True. Hosts own rows: host h has rows [h B / hosts, (h + 1) B / hosts). The order does not depend on the seed.

    Args:
        batch_size: as for `Batches`.
        segment: as for `Batches`.
        documents: whether documents are kept apart: each begins a segment with an empty memory, behind the start id,
            and padding follows its end. Nothing of one document is read in another. Without it, a text is one document,
            as in the released code.
    """

    carries = True

    def __init__(self, batch_size: int, segment: int, documents: bool = False) -> None:
        super().__init__(batch_size, segment)
        self.documents = documents

    def epoch_length(self, tokens: np.ndarray, documents: np.ndarray | None = None) -> int:
        """Returns the segments of a row; raises `UserError` where the tokens don't fill one batch."""
        self._check_length(tokens)
        return len(_Places(int(tokens.size), self.segment, documents)) // self.batch_size

    def _dataset(self, text: Text, seed: int, host: int, hosts: int) -> grain.MapDataset:
        length, rows = self.epoch_length(text.tokens, text.documents), self.batch_size // hosts

        def locate(index: int) -> tuple[int, bool]:
            step, row = divmod(index, rows)
            return (host * rows + row) * length + step, step == 0

        return grain.MapDataset.source(_Segments(text, self.segment, length * rows, locate)).repeat()


class Windows(Batches):
    """Shuffled windows: the tokens are cut into non-overlapping windows, reshuffled each epoch; `reset` is always True.

    Every window comes once in an epoch of N // T windows; the last N mod T tokens are dropped. A batch may hold the
    last windows of one epoch and the first ones of the next. Hosts take turns: host h has windows h, h + hosts, ... of
    the shuffled order, hence rows h, h + hosts, ... of the whole batch.
    """

    carries = False

    def epoch_length(self, tokens: np.ndarray, documents: np.ndarray | None = None) -> int:
        """Returns the batches until every window has come once; raises `UserError` where the tokens don't fill one."""
        self._check_length(tokens)
        return -(-self._num_windows(tokens) // self.batch_size)

    def _num_windows(self, tokens: np.ndarray) -> int:
        return int(tokens.size) // self.segment

    def _dataset(self, text: Text, seed: int, host: int, hosts: int) -> grain.MapDataset:
        windows = _Segments(text, self.segment, self._num_windows(text.tokens), lambda index: (index, True))
        # Sliced after the shuffle: before it, the batches would depend on the number of hosts.
        return grain.MapDataset.source(windows).seed(seed).shuffle().repeat()[host::hosts]


class _Places:
    """Where the segments of a text lie: whole ones of all of it; or those of each document, the last ones shorter."""

    def __init__(self, size: int, segment: int, documents: np.ndarray | None) -> None:
        self._segment = segment
        if documents is None:
            self._begins, self._ends = np.asarray([0]), np.asarray([size // segment * segment])
        else:
            self._begins, self._ends = documents, np.append(documents[1:], size)
        self._firsts = np.append(0, np.cumsum(-(-(self._ends - self._begins) // segment)))  # numbers of segments

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, number: int) -> tuple[int, int, bool]:
        """The first token of a segment, the one behind its last, and whether a document begins there."""
        document = int(np.searchsorted(self._firsts, number, "right")) - 1
        behind = number - int(self._firsts[document])
        begin = int(self._begins[document]) + behind * self._segment
        return begin, min(begin + self._segment, int(self._ends[document])), behind == 0


class _Segments:
    """A grain source of rows; `locate` gives a row's segment number in the corpus and whether its memory is reset."""

    def __init__(self, text: Text, segment: int, length: int, locate: Callable[[int], tuple[int, bool]]) -> None:
        self._text, self._segment, self._length, self._locate = text, segment, length, locate
        self._places = _Places(int(text.tokens.size), segment, text.documents)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, np.ndarray | np.bool_]:
        number, reset = self._locate(index)
        begin, end, opens = self._places[number]
        inputs, targets, weights = (np.pad(one, (0, self._segment - len(one))) for one in self._text.rows(begin, end))
        valid = np.arange(self._segment) < end - begin
        return {
            "inputs": inputs, "targets": targets, "weights": weights, "reset": np.bool_(reset or opens), "valid": valid,
        }  # fmt: skip
