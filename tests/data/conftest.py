"""Every test of the data package prepares corpora in a folder of its own."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def prepared_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "prepared"
    monkeypatch.setenv("LRA_DATA_DIR", str(root))
    return root
