"""The score by context length, of one model or of a group (Dai et al. 2019, arXiv:1901.02860, appendix C).

l(c, t) = -log P(x_t | x_{t-c} .. x_{t-1}): the same tokens t are scored from exactly c tokens of context, for each c.
So each length is a pass of `evaluate` with windows of c tokens, one for each token: c tokens are read for one score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.table import Table

from lra.attention import draw
from lra.attention.visibility import Array
from lra.data import Batch, Corpus
from lra.errors import UserError
from lra.evaluation.breakdown import Breakdown, perplexity
from lra.evaluation.effective_context import SHARES, THRESHOLD, EffectiveContext, effective_contexts
from lra.evaluation.evaluate import evaluate
from lra.evaluation.protocols import Protocol, Sliding
from lra.evaluation.report import Report
from lra.models import Decoder

TARGETS = 2048
"""Tokens that are scored from every length, unless more or fewer are asked for."""


class ByContext(Breakdown):
    """Losses of models by context length, and their relative effective context lengths.

    A window starts with an empty memory, so c tokens are all that its last one is scored from.

    Args:
        lengths: context lengths c in tokens, two or more, ascending at equal steps.
        targets: tokens that are scored, at most: the first of the split that have the longest context before them.

    Raises:
        UserError: other lengths, or no targets.
    """

    name = "context"

    def __init__(self, lengths: Sequence[int], targets: int = TARGETS) -> None:
        steps = np.diff(lengths)
        if not steps.size or min(lengths) < 1 or (steps < 1).any() or (steps != steps[0]).any():
            raise UserError(
                f"context lengths are {list(lengths)}, but must be two or more, ascending at equal steps: choose others"
            )
        if targets < 1:
            raise UserError(f"{targets} tokens are to be scored by context, but it must be at least 1: raise it")
        self.lengths, self.targets = np.asarray(lengths), targets
        self._losses: dict[str, list[np.ndarray]] = {}
        self._nats: list[np.ndarray] = []
        self._tokens: list[np.ndarray] = []

    def begin(self, model: Decoder, corpus: Corpus, protocol: Protocol, reach: int) -> None:
        self._nats, self._tokens = [], []

    def add(self, batch: Batch, nats: np.ndarray, metrics: Mapping[str, Array]) -> None:
        counts = batch.weights > 0
        self._nats.append(nats[counts].astype(np.float64))
        self._tokens.append(batch.targets[counts])

    def check(self, name: str, model: Decoder) -> None:
        """Raises `UserError` where a model cannot read contexts of all lengths: `measure` would find out late."""
        for length in self.lengths.tolist():
            ids = np.zeros((1, length), np.int32)

            def read(ids: np.ndarray = ids) -> Any:
                return model.score(ids, ids, memory=model.initial_memory(1, train=False), key=jax.random.key(0)).nats

            try:
                Sliding(window=length, stride=1).check(model)
                jax.eval_shape(read)  # patterns and terms that cannot do with so few or so many tokens
            except ValueError as error:
                raise UserError(f"{name} cannot read {length} tokens of context, choose others ({error})") from error

    def measure(
        self, name: str, model: Decoder, corpus: Corpus, split: str, *, batch_tokens: int, **options: Any
    ) -> Report:
        """Scores a model of the group at every length.

        Args:
            name: of the model, in what is shown.
            model: the decoder.
            corpus: where the tokens come from, the same for the whole group.
            split: "train", "valid" or "test", likewise.
            batch_tokens: tokens that are read at once, at most, unless one window has more.
            options: as of `evaluate`: key, step, weights, progress.

        Returns:
            The report at the longest length, of the targets and of the tokens before them.

        Raises:
            UserError: the split is too short, or as `evaluate`.
        """
        scored, longest = corpus.scored(split), int(self.lengths[-1])
        size = corpus.tokens(split).size
        numbers = np.arange(min(size, longest + self.targets)) if scored is None else np.flatnonzero(scored)
        chosen = numbers[numbers >= longest][: self.targets]
        if not chosen.size:
            raise UserError(
                f"{corpus.name} {split} has {size} tokens, none of which is scored behind {longest} others: "
                "choose shorter contexts"
            )
        limit = int(chosen[-1]) + 1
        losses = []
        for length in self.lengths.tolist():
            windows = Sliding(window=length, stride=1, batch_size=max(batch_tokens // length, 1))
            report = evaluate(model, corpus, split, windows, limit=limit, breakdown=self, **options)
            tokens = corpus.tokens(split)[numbers[numbers < limit]]
            if not np.array_equal(np.concatenate(self._tokens), tokens):
                raise ValueError("windows that score one token each must come in the order of the text")
            losses.append(np.concatenate(self._nats)[-chosen.size :])
        self._losses[name] = losses
        return report

    @property
    def losses(self) -> np.ndarray:
        """l_i(c, t) in nats [N, C, targets]."""
        return np.asarray(list(self._losses.values()))

    @property
    def effective(self) -> dict[float, list[EffectiveContext]]:
        """The relative effective context length of each model, by share r of the hardest tokens."""
        return {share: effective_contexts(self.losses, self.lengths, share) for share in SHARES}

    def as_dict(self) -> dict[str, Any]:
        effective = self.effective
        runs = []
        for i, (name, means) in enumerate(zip(self._losses, self.losses.mean(axis=2).tolist(), strict=True)):
            by_share = [
                {"share": r, "tokens": each[i].tokens, "at_least": each[i].at_least, "gains": list(each[i].gains)}
                for r, each in effective.items()
            ]
            runs.append(
                {
                    "run": name,
                    "nats_per_token": means,
                    "perplexity": [perplexity(mean) for mean in means],
                    "relative_effective_context_length": by_share,
                }
            )
        return {
            "unit": "tokens of context",
            "lengths": self.lengths.tolist(),
            "targets": self.losses.shape[2],
            "threshold": THRESHOLD,
            "runs": runs,
        }

    def table(self) -> Table:
        """Nats per token by context length, a column a model, and below them how far back each one gains."""
        table = Table(
            title=f"by tokens of context: nats per token of the same {self.losses.shape[2]:,} tokens",
            caption=f"effective: relative effective context length within the {len(self._losses)} model(s) shown, on "
            f"the share r of the tokens that are hardest for all; the next length gains less than {THRESHOLD:.0%}",
            title_justify="left", caption_justify="left",
        )  # fmt: skip
        for name in ("context", *self._losses):
            table.add_column(name, justify="right", overflow="fold")
        for length, means in zip(self.lengths, self.losses.mean(axis=2).T, strict=True):
            table.add_row(str(length), *(f"{mean:.4f}" for mean in means))
        table.add_section()
        for share, each in self.effective.items():
            table.add_row(f"effective, r = {share}", *map(str, each))
        return table

    def png(self, path: Path, caption: str) -> None:
        """Perplexity by context length, a line a model; the legend has the relative effective context lengths."""
        figure = draw.canvas(8, 5)
        axis = figure.subplots()
        for i, (name, nats) in enumerate(zip(self._losses, self.losses.mean(axis=2), strict=True)):
            effective = " / ".join(str(each[i]) for each in self.effective.values())
            axis.plot(self.lengths, np.exp(nats), marker="o", label=f"{name} (effective {effective})")
        axis.set_xticks(self.lengths)
        axis.set_xlabel("tokens of context")
        axis.set_ylabel(f"perplexity of the same {self.losses.shape[2]:,} tokens")
        axis.legend(title=f"effective context at r = {' / '.join(map(str, SHARES))}", fontsize=8, title_fontsize=8)
        figure.suptitle(f"By context, {caption}", fontsize=9, wrap=True)
        draw.save(figure, path, f"By context, {caption}")
