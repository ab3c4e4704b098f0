"""enwik8 and text8: splits, packed sources, what is refused, heads."""

import bz2
import errno
import functools
import gzip
import lzma
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import lra
from lra.data import SPLITS
from lra.data.corpora import Enwik8, Enwik8Head, PublishedCorpus, Text8, Text8Head, single_file
from lra.errors import UserError
from tests.data.corpora.conftest import LETTERS, MARKUP


def joined(corpus: PublishedCorpus) -> bytes:
    return b"".join(b"".join(corpus.text(split)) for split in SPLITS)


def zip_of(path: Path, *members: tuple[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members:
            archive.writestr(name, text)
    return path


def test_the_published_facts() -> None:
    for cls in (Enwik8, Text8):
        assert [cls.facts.counts[split]["bytes"] for split in SPLITS] == [90_000_000, 5_000_000, 5_000_000]
    assert Enwik8.md5 == "a1fa5ffddb56f4953e226637dabbb36a"
    assert Enwik8.facts.ids == {"txl": 204, "adaptive_span": 205}


def test_splits_are_consecutive_bytes(enwik8: Path) -> None:
    corpus = Enwik8()
    corpus.prepare_from(enwik8)
    part = len(MARKUP) // 20
    assert corpus.tokens("train").tobytes() == MARKUP[: -2 * part]
    assert corpus.tokens("valid").tobytes() == MARKUP[-2 * part : -part]
    assert corpus.tokens("test").tobytes() == MARKUP[-part:]
    assert corpus.num_bytes("test") == part
    assert corpus.num_words("test") is None
    assert corpus.digest in corpus.description
    assert corpus.info()["splits"]["train"]["symbols"] == len(set(MARKUP[: -2 * part]))


@pytest.mark.parametrize(
    "pack",
    [gzip.compress, bz2.compress, functools.partial(lzma.compress, format=lzma.FORMAT_XZ)],
    ids=["gz", "bz2", "xz"],
)
def test_packed_sources(enwik8: Path, tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    packed = tmp_path / "some.file"  # told by its first bytes, not by its name
    packed.write_bytes(pack(MARKUP))
    Enwik8().prepare_from(packed)
    assert joined(Enwik8()) == MARKUP


def test_archives_and_folders(enwik8: Path, tmp_path: Path) -> None:
    folder = tmp_path / "downloads"
    folder.mkdir()
    zip_of(folder / "enwik8.zip", ("README", b"about"), ("data/enwik8", MARKUP))
    Enwik8().prepare_from(folder)
    assert joined(Enwik8()) == MARKUP
    with pytest.raises(UserError, match=r"zip archive of 2 files, with 0 named enwik8"):
        Enwik8Head().prepare_from(zip_of(tmp_path / "other.zip", ("a", b"a"), ("b", b"b")))


def test_a_source_that_is_gone_or_empty(enwik8: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no file or folder .*nowhere.*--source"):
        Enwik8().prepare_from(tmp_path / "nowhere")
    (tmp_path / "empty").touch()
    with pytest.raises(UserError, match="it is an empty file"):
        Enwik8().prepare_from(tmp_path / "empty")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="holds no enwik8"):
        Enwik8().prepare_from(tmp_path / "folder")


def test_a_web_page_in_place_of_the_file(enwik8: Path, tmp_path: Path, prepared_root: Path) -> None:
    page = tmp_path / "enwik8.zip"
    page.write_bytes(b"<!DOCTYPE html>\n<title>Not found</title>".ljust(2_400))
    with pytest.raises(UserError) as caught:
        Enwik8().prepare_from(page)
    message = str(caught.value)
    assert "an HTML page of 2.4 kB that begins with b'<!DOCTYPE html>" in message
    assert f"{len(MARKUP):,} bytes with MD5 {Enwik8.md5} needed, 2,400 bytes with MD5" in message
    assert "http://mattmahoney.net/dc/enwik8.zip" in message
    assert list(prepared_root.glob("*")) == []


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress], ids=["gz", "bz2", "xz"])
def test_cut_short(enwik8: Path, tmp_path: Path, pack: Callable[[bytes], bytes], prepared_root: Path) -> None:
    whole = pack(MARKUP)
    path = tmp_path / "cut"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"damaged or cut short .*a packed file of \d+ bytes"):
        Enwik8().prepare_from(path)
    assert list(prepared_root.glob("*")) == []


def test_cut_short_zip_and_plain(enwik8: Path, tmp_path: Path) -> None:
    whole = zip_of(tmp_path / "enwik8.zip", ("enwik8", MARKUP)).read_bytes()
    (tmp_path / "enwik8.zip").write_bytes(whole[:-30])
    with pytest.raises(UserError, match=r"damaged or cut short .*BadZipFile"):
        Enwik8().prepare_from(tmp_path / "enwik8.zip")
    enwik8.write_bytes(MARKUP[:-1])
    with pytest.raises(UserError, match=f"{len(MARKUP) - 1:,} bytes .* found.*prepare what there is as enwik8_head"):
        Enwik8().prepare_from(enwik8)


def test_a_flipped_bit_and_another_corpus(enwik8: Path, text8: Path) -> None:
    enwik8.write_bytes(MARKUP[:100] + b"x" + MARKUP[101:])
    for source in (enwik8, text8):
        with pytest.raises(UserError, match=r"is not enwik8: .*MD5"):
            Enwik8().prepare_from(source)
    with pytest.raises(UserError, match="is not enwik8_head: the beginning of enwik8"):
        Enwik8Head().prepare_from(text8)


def test_heads(enwik8: Path, text8: Path) -> None:
    for cls, path, text in ((Enwik8Head, enwik8, MARKUP), (Text8Head, text8, LETTERS)):
        corpus = cls()
        corpus.prepare_from(path)
        assert joined(corpus) == text
        train, valid = int(len(text) * 0.9), int(len(text) * 0.95)
        assert [corpus.num_bytes(split) for split in SPLITS] == [train, valid - train, len(text) - valid]
        assert corpus.description.startswith(f"{cls.name} (bytes: train {train:,}, ")
    longer = enwik8.with_name("longer")
    longer.write_bytes(MARKUP * 2)
    with pytest.raises(UserError, match="enwik8_head is prepared already from another text"):
        Enwik8Head().prepare_from(longer)
    Enwik8Head().prepare_from(enwik8)


def test_the_whole_is_no_head(enwik8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_file, "WHOLE_BYTES", len(MARKUP))
    with pytest.raises(UserError, match="all of it is the corpus enwik8"):
        Enwik8Head().prepare_from(enwik8)


def test_text8_has_letters_and_spaces_alone(text8: Path, prepared_root: Path) -> None:
    Text8().prepare_from(text8)
    assert Text8().vocabulary.size == 27
    assert Text8().tokens("train").max() < 27
    other = text8.with_name("other")
    other.write_bytes(LETTERS + b"Q" + LETTERS)
    with pytest.raises(UserError, match=f"byte {len(LETTERS):,} of the source of text8_head is b'Q'"):
        Text8Head().prepare_from(other)
    assert [path.name for path in prepared_root.iterdir()] == ["text8"]


def test_vocabularies(enwik8: Path) -> None:
    Enwik8().prepare_from(enwik8)
    symbols = len(set(MARKUP))
    sizes = {"bytes": 256, "txl": symbols - 1, "adaptive_span": symbols, "t2t": 258}
    for name, size in sizes.items():
        corpus = Enwik8(name)
        assert corpus.vocabulary.size == size
        tokens = {split: corpus.tokens(split) for split in SPLITS}
        kept = MARKUP.replace(b"\n", b"") if name == "txl" else MARKUP
        texts = [b"".join(corpus.text(split)) for split in SPLITS]
        ends = sum(not text.endswith(b"\n") for text in texts) if name == "adaptive_span" else 0
        assert sum(part.size for part in tokens.values()) == len(kept) + ends
        assert sum(corpus.num_bytes(split) for split in SPLITS) == len(kept)
        assert sum(corpus.num_characters(split) for split in SPLITS) == len(kept.decode())
        if corpus.vocabulary.lossless:
            assert b"".join(corpus.vocabulary.decode(part) for part in tokens.values()) == MARKUP
        again = Enwik8(name)
        assert again.vocabulary.digest == corpus.vocabulary.digest
        assert (again.tokens("test") == tokens["test"]).all()
    assert len({Enwik8(name).vocabulary.digest for name in sizes}) == 4


def test_subwords_of_a_corpus(enwik8: Path, prepared_root: Path) -> None:
    Enwik8().prepare_from(enwik8)
    corpus = Enwik8("sentencepiece:300")
    assert corpus.vocabulary.name == "sentencepiece_300"
    assert b"".join(corpus.vocabulary.decode(corpus.tokens(split)) for split in SPLITS) == MARKUP
    assert corpus.num_bytes("test") == len(MARKUP) // 20
    model = prepared_root / "enwik8" / "vocabularies" / "sentencepiece_300"
    given = Enwik8(f"sentencepiece:{model}")
    assert (given.tokens("test") == corpus.tokens("test")).all()
    assert Enwik8("sentencepiece:300").vocabulary.digest == corpus.vocabulary.digest


def test_a_vocabulary_of_another_size_than_published(enwik8: Path, small: Callable[..., None]) -> None:
    small(Enwik8, MARKUP, ids={"txl": 204})
    Enwik8().prepare_from(enwik8)
    with pytest.raises(UserError, match=f"txl of enwik8 has {len(set(MARKUP)) - 1} ids, but 204 are needed"):
        Enwik8("txl").vocabulary  # noqa: B018


def test_mistakes(enwik8: Path) -> None:
    with pytest.raises(
        UserError, match=r"enwik8.vocabulary is 'words', but must be one of bytes, txl, adaptive_span, t2t, sen"
    ):
        Enwik8("words")
    for ask in (lambda: Enwik8().tokens("test"), lambda: Enwik8("txl").vocabulary, lambda: Enwik8().digest):
        with pytest.raises(UserError, match=r"enwik8 is not prepared: run `lra data prepare enwik8`.*--source"):
            ask()
    assert Enwik8().vocabulary.size == 256  # needs no text
    Enwik8().prepare_from(enwik8)
    with pytest.raises(UserError, match="enwik8 has no split 'dev'"):
        Enwik8().tokens("dev")
    with pytest.raises(UserError, match="text8_head has no download: give a file or folder with --source"):
        Text8Head().prepare_from(None)


def test_preparing_again_and_being_killed(enwik8: Path, prepared_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("lra.data.store.write_tokens", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Enwik8().prepare_from(enwik8)
    assert not Enwik8().prepared
    assert list(prepared_root.iterdir()) == []
    Enwik8().prepare_from(enwik8)
    before = {path: path.stat().st_mtime_ns for path in Enwik8().folder.rglob("*")}
    assert not any("scratch" in path.name or path.name.startswith(".") for path in before)
    Enwik8().prepare_from(enwik8)
    Enwik8().prepare_from(enwik8.with_name("gone"))  # nothing is read again
    assert {path: path.stat().st_mtime_ns for path in Enwik8().folder.rglob("*")} == before


def test_what_a_kill_has_left_goes_when_the_corpus_is_prepared_again(enwik8: Path, prepared_root: Path) -> None:
    def started() -> tuple[subprocess.Popen, Path]:
        command = [sys.executable, "-c", HOLD, str(prepared_root / "enwik8")]
        environment = {**os.environ, "PYTHONPATH": str(Path(lra.__file__).parents[1])}
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return process, Path(process.stdout.readline().strip())

    for prepared in (False, True):
        process, work = started()
        with process:
            try:
                assert Enwik8().prepared == prepared
                Enwik8().prepare_from(enwik8)
                assert (work / "part").is_file()  # it is still at work
            finally:
                process.kill()
        assert work.is_dir()
        if not prepared:
            shutil.rmtree(Enwik8().folder)
        Enwik8().prepare_from(enwik8)
        assert [path.name for path in prepared_root.iterdir()] == ["enwik8"]


def test_a_full_disk(enwik8: Path, prepared_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lra.data.store.write_tokens", full)
    with pytest.raises(UserError, match=r"No space left on device\): make room there, or set LRA_DATA_DIR"):
        Enwik8().prepare_from(enwik8)
    assert list(prepared_root.iterdir()) == []


HOLD = """
import sys
from pathlib import Path
from lra.data import store
with store.appearing(Path(sys.argv[1])) as work:
    (work / "part").touch()
    print(work, flush=True)
    sys.stdin.read()
"""


def interrupted(*arguments: object) -> None:
    raise KeyboardInterrupt


def test_progress(enwik8: Path) -> None:
    said: list[tuple[str, int]] = []
    Enwik8().prepare_from(enwik8, lambda what, done, total: said.append((what, done)))
    assert ("checking enwik8", len(MARKUP)) in said
    assert [what for what, _ in said if what.startswith("storing")] == [f"storing {split}" for split in SPLITS]
