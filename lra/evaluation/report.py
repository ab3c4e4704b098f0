"""The report of an evaluation: a score never stands without what it counts and how it was made."""

import dataclasses
import math
from typing import Any, Literal

from rich.table import Table

_SELECTION = "by selection: which keys a token reads depends on later tokens too; strict variants are marked *_strict"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """One sum of nats and its counts, from which every unit derives.

    Attributes:
        corpus: name of the corpus.
        corpus_description: what the corpus was made of, with versions and digest.
        split: name of the split.
        tokenisation: name of the vocabulary and its number of ids.
        protocol: `Protocol.describe()`.
        context: what each token was scored from.
        tokens_scored: targets in the sum.
        tokens_expected: targets of the split.
        tokens_right: scored targets that were the likeliest token.
        bytes: bytes of original text that the scored tokens stand for.
        characters: Unicode characters of original text that begin in these bytes.
        words: what perplexity per word divides the nats by, in the corpus' convention; None where it has none, and for
            a part of a split.
        nats_total: negative log-likelihood of all scored tokens.
        partial: whether only the first tokens of the split were scored.
        seconds: wall-clock time, compilation included.
        step: training step of the model, or None where it is not known.
        causality: "strict"; or "selection" where later tokens can change which keys an earlier one reads, though never
            their values, so that the score is not that of a predictor which sees the past alone.
        weights: which parameters were scored: "last", or "ema" for their moving average.

    Raises:
        ValueError: tokens are missing and the report is not marked partial (or the reverse), tokens were scored twice,
            or there is nothing to divide by.
    """

    corpus: str
    corpus_description: str
    split: str
    tokenisation: str
    protocol: str
    context: str
    tokens_scored: int
    tokens_expected: int
    tokens_right: int
    bytes: int
    characters: int
    nats_total: float
    partial: bool
    seconds: float
    words: int | None = None
    step: int | None = None
    weights: str = "last"
    causality: Literal["strict", "selection"] = "strict"

    def __post_init__(self) -> None:
        if self.tokens_scored < 1 or self.bytes < 1:
            raise ValueError(f"a score needs tokens and bytes, got {self.tokens_scored} tokens and {self.bytes} bytes")
        missing = self.tokens_expected - self.tokens_scored
        if missing < 0 or self.partial != (missing > 0):
            raise ValueError(
                f"{self.tokens_scored} of the {self.tokens_expected} tokens of {self.corpus} {self.split} were scored "
                f"with partial={self.partial}: score each token once, and mark the score of a part"
            )

    @property
    def nats_per_token(self) -> float:
        """Mean negative log-likelihood of a token."""
        return self.nats_total / self.tokens_scored

    @property
    def bits_per_byte(self) -> float:
        """Bits for a byte of the original text, whatever the tokens are."""
        return self.nats_total / math.log(2) / self.bytes

    @property
    def bits_per_character(self) -> float:
        """Bits for a Unicode character of the original text, whatever the tokens are; infinite where none begins.

        What papers call bits per character on enwik8 and text8 counts bytes: here those are bits per byte.
        """
        return self.nats_total / math.log(2) / self.characters if self.characters else math.inf

    @property
    def accuracy(self) -> float:
        """Share of scored targets that were the likeliest token."""
        return self.tokens_right / self.tokens_scored

    @property
    def perplexity(self) -> float:
        """Perplexity per token; infinite above the largest float."""
        return _exp(self.nats_per_token)

    @property
    def perplexity_per_word(self) -> float | None:
        """Perplexity per word, whatever the tokens are; None without words."""
        return None if self.words is None else _exp(self.nats_total / self.words)

    @property
    def bits_per_word(self) -> float | None:
        """Bits for a word, whatever the tokens are; None without words."""
        return None if self.words is None else self.nats_total / math.log(2) / self.words

    @property
    def tokens_per_second(self) -> float:
        """Tokens scored in a second of wall-clock time, compilation included."""
        return self.tokens_scored / self.seconds if self.seconds else math.inf

    def as_dict(self) -> dict[str, Any]:
        """The fields and what derives from them, for JSON; None for numbers that JSON cannot hold."""
        units = (
            "nats_per_token", "bits_per_byte", "bits_per_character", "bits_per_word", "perplexity",
            "perplexity_per_word", "accuracy", "tokens_per_second",
        )  # fmt: skip
        derived = {name: getattr(self, name) for name in units}
        values = dataclasses.asdict(self) | derived
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }

    def table(self) -> Table:
        """The report to print with rich."""
        part = " (partial)" if self.partial else ""
        step = "" if self.step is None else f" at step {self.step:,}"
        table = Table(title=f"{self.corpus} {self.split}{step}{part}", show_header=False, title_justify="left")
        per_word, bits_per_word = self.perplexity_per_word, self.bits_per_word
        table.add_column(style="bold")
        table.add_column()
        for name, value in (
            ("bits per byte", f"{self.bits_per_byte:.4f}"),
            ("bits per character", f"{self.bits_per_character:.4f}"),
            ("bits per word", None if bits_per_word is None else f"{bits_per_word:.4f}"),
            ("nats per token", f"{self.nats_per_token:.4f}"),
            ("perplexity per token", f"{self.perplexity:,.4f}"),
            ("perplexity per word", None if per_word is None else f"{per_word:,.4f}"),
            ("accuracy", f"{self.accuracy:.2%}"),
            ("tokens scored", f"{self.tokens_scored:,} of {self.tokens_expected:,}{part}"),
            ("bytes", f"{self.bytes:,}"),
            ("characters", f"{self.characters:,}"),
            ("words", None if self.words is None else f"{self.words:,}"),
            ("weights", self.weights),
            *([("causality", _SELECTION)] if self.causality == "selection" else []),
            ("protocol", self.protocol),
            ("context", self.context),
            ("tokenisation", self.tokenisation),
            ("corpus", self.corpus_description),
            ("time", f"{self.seconds:,.1f} s, {self.tokens_per_second:,.0f} tokens a second"),
        ):
            if value is not None:
                table.add_row(name, value)
        return table


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
