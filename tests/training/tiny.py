"""A tiny experiment without files."""

import functools
import hashlib

import numpy as np

from lra.attention import Full, Recurrence, Rotary
from lra.attention.layer import Attention
from lra.data import Bytes, Streams
from lra.evaluation import Block
from lra.models import Decoder, FeedForward, Stack
from lra.training import Adam, Constant, Experiment, Optimizer, Training

SEGMENT = 8


class Corpus:
    """Random bytes in memory."""

    name = "random_bytes"

    def __init__(self, seed: int = 0, size: int = 500) -> None:
        self.vocabulary = Bytes()
        rng = np.random.default_rng(seed)
        self._splits = {split: rng.integers(97, 113, size, np.uint8) for split in ("train", "valid", "test")}
        self.digest = hashlib.sha256(self._splits["train"].tobytes()).hexdigest()[:16]
        self.description = f"random_bytes (digest {self.digest})"

    def tokens(self, split: str) -> np.ndarray:
        return self._splits[split]

    def scored(self, split: str) -> None:
        return None

    def num_bytes(self, split: str, limit: int | None = None) -> int:
        return self._splits[split][:limit].size

    num_characters = num_bytes

    def num_words(self, split: str) -> None:
        return None


def model(*, pattern=Full, memory: bool = True, dropout: float = 0.1, **options):
    return functools.partial(
        Decoder,
        num_layers=2, width=16, num_heads=2, pattern=pattern, terms=(Rotary,), dropout=dropout,
        attention=functools.partial(Attention, dropout=dropout),
        feed_forward=functools.partial(FeedForward, hidden=16, dropout=dropout),
        stack=functools.partial(Stack, dropout=dropout, scan=True),
        memory=functools.partial(Recurrence, length=SEGMENT) if memory else None,
        **options,
    )  # fmt: skip


def optimizer(update=Adam, schedule=None, **options):
    schedule = schedule or functools.partial(Constant, 0.01)
    return functools.partial(Optimizer, update=update, schedule=schedule, **options)


def experiment(**options) -> Experiment:
    training = {"steps": 4, "log_every": 1, "evaluate_tokens": 40, **options.pop("training", {})}
    defaults = {
        "corpus": Corpus,
        "model": model(),
        "data": functools.partial(Streams, batch_size=3, segment=SEGMENT),
        "optimizer": optimizer(clip_norm=1.0),
        "training": functools.partial(Training, **training),
        "protocols": {"block": functools.partial(Block, segment=SEGMENT, batch_size=5)},
    }
    return Experiment(**{**defaults, **options})


def difference(old: str, new: str) -> list[str]:
    """As lines, for texts without structure."""
    return [f"{a} -> {b}" for a, b in zip(old.split("\n"), new.split("\n"), strict=True) if a != b]
