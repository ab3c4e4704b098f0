"""Vocabularies of subwords by SentencePiece (Kudo and Richardson 2018, arXiv:1808.06226)."""

from __future__ import annotations

import functools
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lra.data.vocabulary import Pieces, Recipe, Vocabulary
from lra.errors import UserError

TRAIN_BYTES = 1 << 24
"""Of text that a model is trained on, at most: minutes on one core."""
LINE_BYTES = 1 << 16
SPACE = "\u2581"
"""What stands for a space in pieces; in a text it becomes one, the only thing that does not come back."""


class SentencePiece(Pieces):
    """The pieces of a SentencePiece model.

    A model that was trained here gives back every UTF-8 text but for the character U+2581: no text is normalised,
    newlines are pieces, and what no piece covers is spelled in bytes. A given model follows its own rules.

    Args:
        name: of the vocabulary.
        model: the content of a `.model` file.

    Raises:
        UserError: it is no such model.
    """

    lossless = False

    def __init__(self, name: str, model: bytes) -> None:
        import sentencepiece  # where nobody asks for subwords, nobody waits for it

        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise UserError(f"what should be a SentencePiece model is none: give a .model file ({error})") from error
        self.name, self.size, self._model = name, int(self._processor.get_piece_size()), model
        bos, newline = self._processor.bos_id(), self._processor.piece_to_id("\n")
        self.start = int(bos if bos >= 0 else newline)

    def state(self) -> bytes:
        """The model."""
        return self._model

    @functools.cached_property
    def pieces(self) -> list[bytes]:
        processor = self._processor
        return [
            bytes([int(processor.id_to_piece(number)[3:-1], 16)]) if processor.is_byte(number)
            else b"" if processor.is_control(number)
            else processor.id_to_piece(number).replace(SPACE, " ").encode()
            for number in range(self.size)
        ]  # fmt: skip

    def encode(self, text: bytes | str) -> np.ndarray:
        """Returns the ids of the likeliest pieces; raises `UserError` for bytes that are not UTF-8."""
        try:
            decoded = text if isinstance(text, str) else text.decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"byte {error.start} of a text is not UTF-8, which SentencePiece needs: "
                "convert the text, or choose the vocabulary 'bytes'"
            ) from error
        return np.asarray(self._processor.encode(decoded, out_type=int), self.dtype)


def train(name: str, texts: Callable[[], Iterable[bytes]], size: int) -> SentencePiece:
    """Trains a unigram model; the same texts give the same model, since one thread draws nothing at random.

    Args:
        name: of the vocabulary.
        texts: gives the documents, twice; each is sampled in its middle, for an equal share of `TRAIN_BYTES`.
        size: pieces; fewer where the texts have not as many.

    Raises:
        UserError: so few pieces cannot spell the texts.
    """
    import sentencepiece

    model = io.BytesIO()
    options: dict[str, Any] = {
        "normalization_rule_name": "identity", "add_dummy_prefix": False, "remove_extra_whitespaces": False,
        "byte_fallback": True, "user_defined_symbols": ["\n"], "hard_vocab_limit": False,
        "unk_id": 0, "bos_id": -1, "eos_id": -1, "pad_id": -1, "num_threads": 1, "minloglevel": 3,
    }  # fmt: skip
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts), model_writer=model, vocab_size=size, max_sentence_length=LINE_BYTES,
            **options,
        )  # fmt: skip
    except RuntimeError as error:
        raise UserError(f"no SentencePiece model of {size} pieces can be trained ({error}): ask for more") from error
    return SentencePiece(name, model.getvalue())


def _lines(texts: Callable[[], Iterable[bytes]]) -> Iterator[str]:
    share = max(TRAIN_BYTES // max(sum(1 for _ in texts()), 1), 1)
    for text in texts():
        middle = max((len(text) - share) // 2, 0)
        for line in text[middle : middle + share].split(b"\n"):
            for begin in range(0, len(line), LINE_BYTES // 2):
                if piece := line[begin : begin + LINE_BYTES // 2].decode("utf-8", "ignore"):
                    yield piece


def sentencepiece_of(argument: str) -> Vocabulary | Recipe:
    """What "sentencepiece:ARGUMENT" stands for: a number of pieces to train, or the file of a model.

    Raises:
        UserError: it is neither.
    """
    if argument.isdecimal():
        size, name = int(argument), f"sentencepiece_{argument}"
        return Recipe(lambda texts: train(name, lambda: texts("train"), size), lambda state: SentencePiece(name, state))
    path = Path(argument).expanduser()
    try:
        model = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"the SentencePiece model {path} cannot be read ({error.strerror}): "
            "give a number of pieces or a .model file"
        ) from error
    return SentencePiece(f"sentencepiece_{hashlib.sha256(model).hexdigest()[:8]}", model)
