import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lra.data
from lra.data import SPLITS, SourceCorpus, records, store
from lra.data.store import data_dir
from lra.errors import UserError


class Toy(SourceCorpus):
    """Documents whose lengths and contents tell them apart; one is empty."""

    name = "toy"
    description = "toy (of this test)"

    def __init__(self, count: int = 23) -> None:
        self.count = count

    def documents(self, split: str) -> Iterator[tuple[str, bytes]]:
        for number in range(self.count if split == "train" else 3):
            yield f"{split}/{number}", bytes([number + SPLITS.index(split)]) * (number % 7)

    def text(self, split: str) -> bytes:
        return b"".join(text for _, text in self.documents(split))


def test_tokens_are_the_documents_in_order(prepared_root: Path) -> None:
    corpus = Toy()
    for split in SPLITS:
        tokens = corpus.tokens(split)
        assert isinstance(tokens, np.memmap)
        assert tokens.ndim == 1
        assert tokens.dtype == np.uint8
        assert tokens.tobytes() == corpus.text(split)
        assert corpus.num_bytes(split) == len(corpus.text(split))
        assert list(records.read(corpus.folder / "text", split)) == [text for _, text in corpus.documents(split)]
    assert [path.name for path in prepared_root.iterdir()] == [f"toy-{corpus.digest}"]
    assert len(corpus.digest) == 16
    assert set(corpus.digest) <= set("0123456789abcdef")


def test_order_is_kept_over_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "SHARD_DOCUMENTS", 2)
    corpus = Toy()
    assert corpus.tokens("train").tobytes() == corpus.text("train")
    assert len(list(corpus.folder.rglob("*train.array_record*"))) == 12  # of more than one digit


def test_preparation_is_silent_and_leaves_no_other_file(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    Toy().prepare()
    assert capfd.readouterr() == ("", "")
    assert list(temporary.iterdir()) == []


def test_preparing_again_writes_nothing() -> None:
    Toy().prepare()
    before = {path: path.stat().st_mtime_ns for path in Toy().folder.rglob("*")}
    Toy().prepare()
    assert {path: path.stat().st_mtime_ns for path in Toy().folder.rglob("*")} == before


def test_digest_and_folder_follow_the_content() -> None:
    assert Toy().digest == Toy().digest
    assert Toy(23).digest != Toy(19).digest
    assert Toy(23).folder != Toy(19).folder
    assert Toy(19).tokens("train").tobytes() != Toy(23).tokens("train").tobytes()


def test_digest_sees_where_splits_end() -> None:
    class Moved(Toy):
        def documents(self, split: str) -> Iterator[tuple[str, bytes]]:
            yield from {"train": [("a", b"12")], "valid": [("b", b"3")], "test": [("c", b"4")]}[split]

    class Other(Toy):
        def documents(self, split: str) -> Iterator[tuple[str, bytes]]:
            yield from {"train": [("a", b"1")], "valid": [("b", b"23")], "test": [("c", b"4")]}[split]

    assert Moved().digest != Other().digest


def test_interrupted_preparation_leaves_nothing(prepared_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(records, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Toy().prepare()
    assert not Toy().prepared
    assert list(prepared_root.iterdir()) == []
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_tokens", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Toy().tokens("train")
    assert list((Toy().folder / "tokens").iterdir()) == []
    assert Toy().tokens("train").tobytes() == Toy().text("train")


def test_second_of_two_processes_uses_the_work_of_the_first(
    prepared_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = store.write_text

    def overtaken(folder: Path, *arguments: Any, **options: Any) -> None:
        write(folder, *arguments, **options)
        shutil.copytree(folder, Toy().folder)
        (Toy().folder / "first").touch()

    monkeypatch.setattr(store, "write_text", overtaken)
    Toy().prepare()
    assert (Toy().folder / "first").exists()
    assert list(prepared_root.iterdir()) == [Toy().folder]


def test_source_that_changes_meanwhile_raises() -> None:
    class Changing(Toy):
        def documents(self, split: str) -> Iterator[tuple[str, bytes]]:
            yield from super().documents(split)
            if self.__dict__.get("digest"):
                yield "new", b"more"

    corpus = Changing()
    with pytest.raises(UserError, match="changed while it was read"):
        corpus.prepare()
    assert not corpus.prepared


def test_order_that_gets_lost_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    read = records.read
    monkeypatch.setattr(records, "read", lambda folder, split: reversed(list(read(folder, split))))
    with pytest.raises(UserError, match="toy"):
        Toy().prepare()


def test_unknown_split_names_those_that_exist(prepared_root: Path) -> None:
    for ask in (Toy().tokens, Toy().num_bytes):
        with pytest.raises(UserError, match=r"'dev'.*train, valid, test"):
            ask("dev")
    assert not prepared_root.exists()


def test_corpus_that_does_not_know_its_documents_refuses() -> None:
    with pytest.raises(UserError, match=r"corpus toy does not say where documents begin: .*Streams.documents = False"):
        Toy().document_starts("train")


def test_folder_that_cannot_be_written_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LRA_DATA_DIR", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set LRA_DATA_DIR"):
        Toy().prepare()


def test_data_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LRA_DATA_DIR", str(tmp_path))
    assert data_dir() == tmp_path
    monkeypatch.delenv("LRA_DATA_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_dir() == tmp_path / "lra"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_dir() == Path.home() / ".cache" / "lra"


def test_neither_tensorflow_nor_torch_nor_gin_is_imported(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"0123456789" * 7)
    program = (
        "import sys, lra.data as data\n"
        "assert 'tensorflow_datasets' not in sys.modules\n"
        "tokens = data.TextFile(sys.argv[1]).tokens('train')\n"
        "next(data.Windows(3, 5).batches(tokens, start=10, seed=0))\n"
        "print(sorted({'tensorflow', 'torch', 'gin'} & set(sys.modules)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(lra.data.__file__).parents[2])}
    command = [sys.executable, "-c", program, str(tmp_path / "text")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
