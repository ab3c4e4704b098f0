"""Published numbers as data, and tables of them with this project's runs."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lra import tables
from lra.cli import main
from lra.data import PUBLISHED
from lra.evaluation import published
from lra.training import evaluations


@pytest.mark.parametrize("name", published.NAMES)
def test_published_numbers_are_complete(name: str) -> None:
    rows = published.read(name)
    assert {row.metric for row in rows} == (
        {"bits per character"}
        if name in ("enwik8", "text8")
        else {"perplexity", "perplexity per word"} & {rows[0].metric}
    )
    assert all(row.source and row.paper and row.system and row.protocol and row.tokenisation for row in rows)
    assert all(row.kind in ("result", "ablation", "comparator") for row in rows)
    assert all(row.verified != ("memory, unverified" in row.source) for row in rows)
    assert name in PUBLISHED
    tables.rows(name, Path("nowhere"), everything=True)  # no two rows of one configuration and split


def test_some_published_numbers() -> None:
    def value(name: str, system: str, configuration: str, split: str) -> list[float]:
        return [
            row.value for row in published.read(name)
            if (row.system, row.split, row.kind) == (system, split, "result")
            and row.configuration.startswith(configuration)
        ]  # fmt: skip

    assert value("enwik8", "Transformer-XL", "24L", "test") == [0.99]
    assert value("enwik8", "Adaptive Attention Span", "12L", "valid") == [1.04]
    assert value("text8", "Longformer", "small", "test") == [1.1]
    assert value("wikitext103", "Transformer-XL", "Large", "test") == [18.3]
    assert value("wikitext103", "Transformer-XL", "Large", "valid") == [17.7]
    assert value("pg19", "Compressive Transformer", "36L", "test") == [33.6]


@pytest.fixture
def leave(tmp_path: Path) -> Callable[..., None]:
    """Leaves a report in the folder of a run under `tmp_path / "runs"`."""

    def write(run: str, seed: int = 0, width: int = 8, **values: Any) -> None:
        folder = tmp_path / "runs" / run
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.gin").write_text(f"Decoder.width = {width}\nExperiment.seed = {seed}\nFull.a = 1\n")
        known = {
            "corpus": "enwik8", "split": "test", "tokenisation": "bytes (256 ids)", "protocol": "block, segment 7",
            "protocol_name": "block", "bits_per_byte": 1.5, "perplexity": 9.0, "perplexity_per_word": None,
            "partial": False, "tokens_scored": 4_096, "weights": "last", "step": 1_000, "parameters": 12_345,
            "seed": seed, "causality": "strict",
        }  # fmt: skip
        evaluations.keep(folder, known | values)

    return write


def own(tmp_path: Path, name: str = "enwik8") -> list[tables.Row]:
    return [row for row in tables.rows(name, tmp_path / "runs") if row.source == "this project"]


def test_a_run_joins_its_splits(leave: Callable[..., None], tmp_path: Path) -> None:
    leave("a")
    leave("a", split="valid", bits_per_byte=1.25)
    leave("a", protocol="carried, streams 2", protocol_name="carried", bits_per_byte=1.4)
    leave("b", corpus="text8")
    block, carried = own(tmp_path)
    assert (block.valid, block.test, block.parameters, block.steps) == ((1.25,), (1.5,), 12_345, 1_000)
    assert (carried.valid, carried.test, carried.protocol) == ((), (1.4,), "carried, streams 2")
    assert block.marks == ()
    assert block.system.endswith("runs/a")


def test_seeds_are_one_row_with_their_spread(leave: Callable[..., None], tmp_path: Path) -> None:
    for seed, score in enumerate((1.5, 1.6, 1.7)):
        leave(f"s{seed}", seed=seed, bits_per_byte=score)
    leave("wide", width=16)
    row, wide = own(tmp_path)
    assert row.test == (1.5, 1.6, 1.7)
    assert row.system.endswith("s0 and 2 more")
    assert row.cells()[3] == "1.6000 ± 0.1000 (3 seeds)"
    values = row.as_dict()
    assert values["test"] == pytest.approx(1.6)
    assert values["test_spread"] == pytest.approx(0.1)
    assert (values["test_seeds"], values["valid"], values["valid_spread"]) == (3, None, None)
    assert wide.cells()[3] == "1.5000"


def test_parts_of_other_lengths_have_rows_of_their_own(leave: Callable[..., None], tmp_path: Path) -> None:
    leave("long", seed=1, partial=True)
    leave("short", seed=2, partial=True, tokens_scored=20, bits_per_byte=3.0)
    assert [row.test for row in own(tmp_path)] == [(1.5,), (3.0,)]


def test_a_run_counts_once(leave: Callable[..., None], tmp_path: Path) -> None:
    leave("one")
    leave("one", protocol_name="another name for it")
    (row,) = tables.rows("enwik8", tmp_path / "runs")[-1:]
    assert row.test == (1.5,)


def test_words_are_those_that_numbers_stand_on_or_marked(leave: Callable[..., None], tmp_path: Path) -> None:
    for width, (run, tokenisation) in enumerate(
        (("own", "words (30211 ids)"), ("given", "words_0123abcd (267735 ids)"), ("pieces", "sentencepiece_9 (9 ids)"))
    ):
        leave(run, width=width, corpus="wikitext103_head", tokenisation=tokenisation, partial=True)
    marks = {Path(row.system).name: row.marks[2:] for row in own(tmp_path, "wikitext103")}
    assert marks["own"] == ("30,211 words instead of 267,735",)
    assert marks["given"] == ()
    assert marks["pieces"] == ("other tokenisation than words",)
    tests = {Path(row.system).name: row.test for row in own(tmp_path, "wikitext103")}
    assert tests == {"own": (9.0,), "given": (9.0,), "pieces": ()}


def test_what_is_not_comparable_is_marked(leave: Callable[..., None], tmp_path: Path) -> None:
    for width, (run, values, mark) in enumerate(
        (
            ("head", {"corpus": "enwik8_head"}, "enwik8_head, not enwik8"),
            ("part", {"partial": True}, "partial: the first 4,096 tokens of a split only"),
            ("txl", {"tokenisation": "txl (204 ids)"}, "other tokenisation than bytes"),
            ("lsh", {"causality": "selection"}, "selection reads the future"),
            ("ema", {"weights": "ema"}, "moving average of the parameters"),
        )
    ):
        leave(run, width=width, **values)
        (row,) = (row for row in own(tmp_path) if row.system.endswith(f"/{run}"))
        assert row.marks == (mark,)
    found = {row.system: row for row in tables.rows("enwik8", tmp_path / "none")}
    assert "selection reads the future" in found["Reformer, 12L, longer and tuned"].marks
    assert "other tokenisation than bytes" in found["Transformer-XL, 24L"].marks
    assert "unverified: from memory" in found["Local Transformer, 24L 8h"].marks
    assert not any("comparator" in row.system for row in found.values())


def test_perplexity_per_word(leave: Callable[..., None], tmp_path: Path) -> None:
    leave("w", corpus="wikitext103", tokenisation="words (267735 ids)", perplexity_per_word=20.5)
    leave("p", corpus="wikitext103_head", tokenisation="words (9 ids)", partial=True)
    leave("b", corpus="wikitext103_head", tokenisation="bytes (256 ids)", partial=True)
    leave("g", corpus="pg19", tokenisation="bytes (256 ids)", perplexity_per_word=44.0)
    scores = {row.system.split("/")[-1]: row.test for row in own(tmp_path, "wikitext103")}
    assert scores == {"w": (20.5,), "p": (9.0,), "b": ()}
    (pg19,) = own(tmp_path, "pg19")
    assert (pg19.test, pg19.marks) == ((44.0,), ())


def test_files_that_are_no_reports_are_passed_over(leave: Callable[..., None], tmp_path: Path) -> None:
    leave("a")
    for name, text in (("broken", "{"), ("list", "[]"), ("other", '{"split": "test"}')):
        (tmp_path / "runs" / "a" / "evaluations" / f"{name}.json").write_text(text)
    assert len(own(tmp_path)) == 1


def test_formats(leave: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave("a_b")
    outs = {}
    for form in ("terminal", "markdown", "csv", "json", "latex"):
        assert main(["table", "enwik8", "--runs", str(tmp_path / "runs"), "--format", form]) == 0
        outs[form] = capsys.readouterr().out
    rows = list(csv.reader(io.StringIO(outs["csv"])))
    assert tuple(rows[0]) == tables.HEADERS
    assert rows[-1][1:4] == ["12,345", "", "1.5000"]
    assert json.loads(outs["json"])["rows"][-1]["test"] == 1.5
    assert json.loads(outs["json"])["metric"] == "bits per byte, bits per character in papers"
    lines = outs["markdown"].splitlines()
    assert len(lines) == len(rows) + 1
    assert [cell.strip() for cell in lines[-1].split("|")[2:5]] == ["12,345", "", "1.5000"]
    assert outs["latex"].startswith("\\begin{tabular}")
    assert "a\\_b & 12,345" in " ".join(outs["latex"].split())
    assert "selection reads the future" in outs["terminal"]
    assert main(["table", "enwik8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"]


def test_all_rows_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", "wikitext103", "--format", "csv", "--all"]) == 0
    assert "ablation" in capsys.readouterr().out
    assert len(tables.rows("enwik8", Path("none"), everything=True)) > len(tables.rows("enwik8", Path("none")))


def test_mistakes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["table", "enwik8", "--runs", str(tmp_path / "gone")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["table", "imagenet"])
    assert "invalid choice: 'imagenet'" in capsys.readouterr().err
