import platform
from pathlib import Path

import numpy as np
import pytest

from lra.data import SPLITS, PythonSource, python_source
from lra.errors import UserError

KEPT = ["a.py", "b_test.py", "email/__init__.py", "email/z.py", *(f"package/module{number}.py" for number in range(61))]
SKIPPED = [
    "LICENSE.txt",
    "__pycache__/a.py",
    "_sysconfigdata__linux.py",
    "config-3.11/python-config.py",
    "dist-packages/d.py",
    "email/test_mail.py",
    "idlelib/idle_test/i.py",
    "lib2to3/tests/t.py",
    "site-packages/s.py",
    "test/t.py",
]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "stdlib"
    for name in KEPT + SKIPPED:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"" if name.endswith("__init__.py") else f"# {name}\r\n".encode() + b"\xff")
    monkeypatch.setattr(python_source, "_root", lambda: root)
    return root


def test_files_and_their_order(root: Path) -> None:
    corpus = PythonSource()
    paths = {split: [path for path, _ in corpus.documents(split)] for split in SPLITS}
    assert sorted(path for split in SPLITS for path in paths[split]) == sorted(KEPT)
    for split in SPLITS:
        assert paths[split]
        assert paths[split] == sorted(paths[split])
        assert corpus.tokens(split).tobytes() == b"".join((root / path).read_bytes() for path in paths[split])


def test_documents_are_the_files_that_hold_something(root: Path) -> None:
    corpus = PythonSource()
    for split in SPLITS:
        texts = [text for _, text in corpus.documents(split) if text]
        for _ in range(2):  # computed, and read back
            starts = corpus.document_starts(split)
            assert starts.dtype == np.int64
            pieces = np.split(corpus.tokens(split), starts[1:])
            assert starts[0] == 0
            assert [piece.tobytes() for piece in pieces] == texts
    with pytest.raises(UserError, match="no split 'all'"):
        corpus.document_starts("all")


def test_split_depends_on_the_path_alone(root: Path) -> None:
    before = {path: split for split in SPLITS for path, _ in PythonSource().documents(split)}
    digest = PythonSource().digest
    (root / "a.py").write_bytes(b"changed")
    (root / "new.py").write_bytes(b"new")
    after = {path: split for split in SPLITS for path, _ in PythonSource().documents(split)}
    after.pop("new.py")
    assert after == before
    assert PythonSource().digest != digest
    # Published: moving a file to another split would make scores incomparable.
    assert [python_source._split(path) for path in ("cmd.py", "os.py", "ast.py")] == ["train", "valid", "test"]


def test_python_without_sources_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_source, "_root", lambda: tmp_path)
    with pytest.raises(UserError, match=r"no \.py files"):
        PythonSource().prepare()


def test_real_standard_library() -> None:
    corpus = PythonSource()
    sizes = [corpus.num_bytes(split) for split in SPLITS]
    assert sum(sizes) > 5_000_000
    assert 0.85 < sizes[0] / sum(sizes) < 0.95
    assert min(sizes) > 100_000
    assert f"Python {platform.python_version()}" in corpus.description
    assert corpus.digest in corpus.description
    for split in SPLITS:
        assert corpus.tokens(split).tobytes() == b"".join(text for _, text in corpus.documents(split))
    paths = [path for split in SPLITS for path, _ in corpus.documents(split)]
    assert "os.py" in paths
    assert "json/decoder.py" in paths
    assert not any("test_" in path or "packages" in path or "sysconfigdata" in path for path in paths)
