from pathlib import Path

import numpy as np
import pytest

from lra.data import SPLITS, TextFile, text_file
from lra.errors import UserError

TEXT = np.random.default_rng(0).integers(0, 256, 1009, np.uint8).tobytes() + b"\xff\xfe\r\n\n\r\x00" * 3


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "notes.txt"
    path.write_bytes(TEXT)
    return path


def joined(corpus: TextFile) -> bytes:
    return b"".join(corpus.tokens(split).tobytes() for split in SPLITS)


def test_splits_are_contiguous_and_lossless(path: Path) -> None:
    corpus = TextFile(str(path), valid_fraction=0.1, test_fraction=0.2)
    assert joined(corpus) == TEXT
    assert [corpus.num_bytes(split) for split in SPLITS] == [721, 103, 206]


def test_files_follow_each_other_in_the_given_order(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_file, "CHUNK_BYTES", 31)
    other = tmp_path / "a.txt"
    other.write_bytes(b"other\r\n" * 13)
    corpus = TextFile((str(path), str(other)), valid_fraction=0.11, test_fraction=0.03)
    assert joined(corpus) == TEXT + other.read_bytes()
    assert TextFile((str(other), str(path))).digest != TextFile((str(path), str(other))).digest
    assert "notes.txt, a.txt" in corpus.description
    assert corpus.digest in corpus.description


def test_documents_are_the_parts_of_files(path: Path, tmp_path: Path) -> None:
    """Also where a split begins within a file, or with one."""
    names = [str(path)]
    for name, size in (("a", 70), ("b", 30)):
        (tmp_path / name).write_bytes(name.encode() * size)
        names.append(str(tmp_path / name))
    total = len(TEXT) + 100
    corpus = TextFile(names, valid_fraction=(80 + 0.5) / total, test_fraction=(30 + 0.5) / total)
    assert [corpus.document_starts(split).tolist() for split in SPLITS] == [[0], [0, 10], [0]]
    assert corpus.tokens("valid").tobytes() == TEXT[-10:] + b"a" * 70
    assert TextFile(names, 1e-2, 1e-2).document_starts("train").tolist() == [0, len(TEXT), len(TEXT) + 70]


def test_digest_follows_content_not_name(path: Path, tmp_path: Path) -> None:
    same = tmp_path / "same"
    same.write_bytes(TEXT)
    digest = TextFile(str(path)).digest
    assert TextFile(str(same)).digest == digest
    path.write_bytes(TEXT[:-1] + b"\x01")
    assert TextFile(str(path)).digest != digest
    assert TextFile(str(same), valid_fraction=0.1).digest != digest


def test_both_of_two_files_stay_prepared(path: Path, tmp_path: Path, prepared_root: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(TEXT[::-1])
    assert joined(TextFile(str(path))) == TEXT
    assert joined(TextFile(str(other))) == TEXT[::-1]
    assert joined(TextFile(str(path))) == TEXT
    assert len(list(prepared_root.iterdir())) == 2


def test_file_shorter_than_it_was_raises(path: Path) -> None:
    text = TextFile(str(path))
    text.digest  # noqa: B018
    path.write_bytes(TEXT[:100])
    with pytest.raises(UserError, match="shorter than it was"):
        text.prepare()


def test_bad_files_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    (tmp_path / "empty").touch()
    for bad, reason in (("missing", "does not exist"), ("empty", "is empty"), (".", "not a regular file")):
        with pytest.raises(UserError, match=reason):
            TextFile((str(path), str(tmp_path / bad)))
    with pytest.raises(UserError, match="no file"):
        TextFile(())

    def denied(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(UserError, match=r"cannot be read \(Permission denied\)"):
        TextFile(str(path))


@pytest.mark.parametrize("fractions", [(0.0, 0.1), (0.1, -0.1), (0.5, 0.5), (float("nan"), 0.1)])
def test_bad_fractions_raise(path: Path, fractions: tuple[float, float]) -> None:
    with pytest.raises(UserError, match="sum below 1"):
        TextFile(str(path), *fractions)


def test_text_too_short_for_three_splits_raises(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(b"0123456789")
    with pytest.raises(UserError, match="10 bytes, too few"):
        TextFile(str(short))
    assert joined(TextFile(str(short), 0.1, 0.1)) == b"0123456789"
