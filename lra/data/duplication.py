"""The duplication task (Kitaev et al. 2020, arXiv:2001.04451, section 5): 0w0w, whose second half is a copy."""

from collections.abc import Iterator

import numpy as np

from lra.data.corpus import CHUNK_BYTES, SourceCorpus
from lra.data.store import SPLITS
from lra.errors import UserError


class Duplication(SourceCorpus):
    """Examples 0w0w one after the other, w being drawn from `symbols` symbols; the second half of each is scored.

    Symbol n is the byte n and 0 separates, so that `Bytes` is the vocabulary. To predict the second half, a model has
    to read |w| tokens back. The paper has |w| = 511 and 127 symbols: `example` = 1024. The texts are drawn on the host,
    from the seed and the split alone.

    Args:
        example: tokens of an example, 2 |w| + 2; make it a model's segment.
        symbols: how many there are, at most 255.
        train: examples in "train". held_out: in "valid" and in "test" each.
        seed: of the examples.

    Raises:
        UserError: a number out of range.
    """

    name = "duplication"

    def __init__(
        self, example: int, symbols: int = 127, train: int = 16_384, held_out: int = 512, seed: int = 0
    ) -> None:
        for argument, value, least, most in (
            ("symbols", symbols, 1, 255), ("train", train, 1, None), ("held_out", held_out, 1, None),
            ("seed", seed, 0, 2**32 - 1), ("example", example, 4, None),
        ):  # fmt: skip
            if value < least or (most is not None and value > most):
                bound = f"at least {least}" + (f" and at most {most}" if most is not None else "")
                raise UserError(f"duplication.{argument} is {value}, but must be {bound}: change it")
        if example % 2:
            raise UserError(f"duplication.example is {example}, but both halves 0w are equal: make it even")
        self._example, self._symbols, self._seed = example, symbols, seed
        self._counts = dict(zip(SPLITS, (train, held_out, held_out), strict=True))

    @property
    def description(self) -> str:
        """The name, the sizes and the digest."""
        words = f"0w0w with words of {self._example // 2 - 1} of {self._symbols} symbols, second half scored"
        return f"{self.name} ({words}, seed {self._seed}, digest {self.digest})"

    def documents(self, split: str) -> Iterator[tuple[str, bytes]]:
        """Yields (split/number, examples) of 1 MiB or a little less."""
        rng = np.random.default_rng([self._seed, SPLITS.index(split)])
        at_once = max(1, CHUNK_BYTES // self._example)
        for number, begin in enumerate(range(0, self._counts[split], at_once)):
            count = min(at_once, self._counts[split] - begin)
            words = rng.integers(1, self._symbols + 1, (count, self._example // 2 - 1), np.uint8)
            half = np.pad(words, ((0, 0), (1, 0)))
            yield f"{split}/{number}", np.tile(half, 2).tobytes()

    def scored(self, split: str) -> np.ndarray:
        """Returns the second halves."""
        half = np.repeat([False, True], self._example // 2)
        return np.tile(half, self._counts[split])
