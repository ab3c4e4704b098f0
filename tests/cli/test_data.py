"""`lra data`, and runs that read its corpora."""

import json
from pathlib import Path

import pytest

from lra.registry import CORPORA

CONFIG = """
include "quickstart.gin"
include "data/enwik8.gin"

LAYERS = 1
WIDTH = 16
HEADS = 2
WINDOW = 5
SEGMENT = 16
BATCH = 2
STEPS = 2
WARMUP = 1
"""


@pytest.fixture(autouse=True)
def prepared(monkeypatch, tmp_path) -> Path:
    """Where this test's corpora lie."""
    monkeypatch.setenv("LRA_DATA_DIR", str(tmp_path / "prepared"))
    return tmp_path / "prepared"


@pytest.fixture
def head(workplace) -> Path:
    path = workplace / "head"
    path.write_bytes(b"<mediawiki x>\n" + b"some text\n" * 211)
    return path


def test_all_corpora_are_listed(lra, head):
    rows = json.loads(lra("data", "list", "--json").out)
    assert [row["name"] for row in rows] == list(CORPORA)
    assert {row["status"] for row in rows} == {"not prepared", "set its path"}
    assert lra("data", "prepare", "enwik8_head", "--source", str(head)).status == 0
    rows = {row["name"]: row["status"] for row in json.loads(lra("data", "list", "--json").out)}
    assert [name for name, status in rows.items() if status == "prepared"] == ["enwik8_head"]
    table = lra("data", "list").out
    assert all(name in table for name in CORPORA)


def test_info_before_and_after(lra, head, prepared):
    before = json.loads(lra("data", "info", "enwik8", "--json").out)
    assert before["expected"]["valid"] == {"bytes": 5_000_000}
    assert before["sources"] == {"http://mattmahoney.net/dc/enwik8.zip": None}
    assert "CC BY-SA" in before["licence"]
    assert "Mahoney" in before["citation"]
    done = json.loads(lra("data", "prepare", "enwik8_head", "--source", str(head), "--json").out)
    assert (done["folder"], done["prepared_before"]) == (str(prepared / "enwik8_head"), False)
    after = json.loads(lra("data", "info", "enwik8_head", "--json").out)
    assert after["splits"] == done["splits"]
    assert sum(split["bytes"] for split in after["splits"].values()) == head.stat().st_size
    shown = lra("data", "info", "enwik8_head").out
    for part in (after["digest"], after["splits"]["test"]["sha256"], "Mahoney", "adaptive_span"):
        assert part in shown
    again = lra("data", "prepare", "enwik8_head", "--source", str(head))
    assert again.out.endswith("already\n")
    assert again.err == ""


def test_the_source_code_of_python(lra):
    assert json.loads(lra("data", "info", "python_source", "--json").out)["status"] == "not prepared"


def test_mistakes(lra, head):
    for command, message in (
        (("info", "enwik9"), "there is no corpus 'enwik9': did you mean enwik8"),
        (("prepare", "text_file"), "text_file is prepared when a run reads it: set text_file.path"),
        (("prepare", "python_source", "--source", "x"), "python_source has a source of its own"),
        (("prepare", "text8_head", "--source", str(head)), "is not text8_head: the beginning of text8"),
    ):
        result = lra("data", *command)
        assert result.status == 2
        assert message in result.err
        assert len(result.err.splitlines()) == 1


def test_a_run_on_a_head(lra, head, workplace):
    (workplace / "e8.gin").write_text(CONFIG, encoding="utf-8")
    missing = lra("train", "e8.gin")
    assert missing.status == 2
    assert "enwik8 is not prepared: run `lra data prepare enwik8`" in missing.err
    assert not Path("runs").exists()
    lra("data", "prepare", "enwik8_head", "--source", str(head))
    assert lra("train", "e8.gin", "--set", "Experiment.corpus = @enwik8_head").status == 0
    report = json.loads(lra("eval", "e8.gin", "--partial", "40", "--json").out)
    assert (report["corpus"], report["partial"], report["words"]) == ("enwik8_head", True, None)
    (kept,) = Path("runs/e8/evaluations").iterdir()
    assert json.loads(kept.read_text()) == report
    assert report["parameters"] == json.loads(lra("params", "runs/e8", "--json").out)["total"]
    lra("eval", "e8.gin", "--partial", "40")
    assert list(kept.parent.iterdir()) == [kept]  # the newest of its kind alone
    lra("eval", "e8.gin", "--partial", "40", "--set", "Block.segment = 5")
    assert len(list(kept.parent.iterdir())) == 2
    other = lra("eval", "e8.gin", "--set", 'enwik8_head.vocabulary = "t2t"')
    assert other.status == 2
    assert "reads text as bytes (256 ids, digest " in other.err
    assert "now read as t2t (258 ids, digest " in other.err
