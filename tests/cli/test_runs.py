"""What a run says of itself: the record, the list of runs, configurations side by side."""

import contextlib
import json
import sys
from pathlib import Path

import jax
import pytest

from lra import config
from lra.training import folder


def record(run: Path) -> dict:
    return json.loads((run / "record.json").read_text(encoding="utf-8"))


def losses(run: Path) -> list[tuple]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [(line["step"], line["split"], line["loss_nats"]) for line in lines if line["step"]]


# the record


def test_the_record_says_with_what_a_run_was_made(trained):
    found = record(trained)
    assert (found["status"], found["steps"], found["reason"]) == ("finished", 4, None)
    assert found["corpus"]["corpus"] == "text_file"
    assert len(found["corpus"]["digest"]) > 8
    (start,) = found["starts"]
    assert (start["step"], start["config"], start["command"]) == (0, "tiny.gin", ["lra", "train", "tiny.gin"])
    assert start["python"] == sys.version.split()[0]
    assert start["packages"]["jax"] == jax.__version__
    assert start["device"]["platform"] == "cpu"
    assert set(start["lra"]) == {"version", "commit", "dirty"}
    assert start["time"] <= found["time"]


def test_every_start_is_recorded(lra):
    for steps, status in (("1", "stopped"), ("3", "stopped"), ("4", "finished")):
        lra("train", "tiny.gin", "--steps", steps)
        assert record(Path("runs/tiny"))["status"] == status
    assert [start["step"] for start in record(Path("runs/tiny"))["starts"]] == [0, 1, 3]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ZeroDivisionError("no luck"), "no luck"),
        (ZeroDivisionError(), "ZeroDivisionError"),
        (RuntimeError("CpuCallback error\nlra.errors.UserError: too many\nat ..."), "too many"),
    ],
)
def test_a_failure_is_recorded_with_its_reason(lra, monkeypatch, error, reason):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr("lra.training.loop.Clock", fails)
    with contextlib.suppress(ZeroDivisionError):
        lra("train", "tiny.gin")
    found = record(Path("runs/tiny"))
    assert (found["status"], found["reason"]) == ("failed", reason)


def test_the_commit_is_of_the_source_alone(monkeypatch, tmp_path):
    import subprocess

    from lra.training import record as module

    (tmp_path / "lra").mkdir()
    monkeypatch.setattr(module.lra, "__file__", str(tmp_path / "lra" / "__init__.py"))
    assert module._commit() == {"commit": None, "dirty": None}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "lra" / "__init__.py").touch()
    subprocess.run([*git, "add", "lra"], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    (tmp_path / "tiny.gin").unlink(missing_ok=True)
    (tmp_path / "book.txt").unlink(missing_ok=True)
    clean = module._commit()
    assert (len(clean["commit"]), clean["dirty"]) == (40, False)
    (tmp_path / "lra" / "__init__.py").write_text("changed = 1")
    assert module._commit() == {**clean, "dirty": True}


def test_a_new_run_from_the_resolved_configuration_alone_has_the_same_losses(trained, lra):
    (trained / "config.gin").rename("alone.gin")
    assert lra("train", "alone.gin", "--workdir", "again").status == 0
    assert losses(Path("again")) == losses(trained)


# lra runs


def test_runs_are_listed_with_scores_and_status(trained, lra):
    lra("train", "tiny.gin", "--workdir", "runs/deeper/half", "--steps", "2", "--set", "Training.evaluate_every=1")
    with Path("runs/deeper/half/metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 3, "spl')
    killed = Path("runs/killed")
    killed.mkdir()
    (killed / "config.gin").touch()
    (killed / "record.json").write_text('{"status": "running", "starts": [{"config": "mine"}], "steps": 9}')
    bare = Path("runs/bare")
    (bare / "checkpoints" / "7").mkdir(parents=True)
    (bare / "config.gin").touch()
    scores = [json.loads(line) for line in Path("runs/deeper/half/metrics.jsonl").read_text().splitlines()[:-1]]
    scores = [line["bits_per_byte"] for line in scores if line["split"] == "valid"]
    with folder.claim(trained, (trained / "config.gin").read_text(encoding="utf-8"), config.difference):
        found = {row.pop("run"): row for row in json.loads(lra("runs", "--json").out)}
        table = lra("runs").out
    assert list(found) == ["runs/bare", "runs/deeper/half", "runs/killed", "runs/tiny"]
    assert found["runs/tiny"]["status"] == "running"
    assert found["runs/deeper/half"] == {
        "config": "tiny.gin", "step": 2, "steps": 4, "best": min(scores), "last": scores[-1], "status": "stopped",
    }  # fmt: skip
    assert found["runs/killed"] == {
        "config": "mine", "step": 0, "steps": 9, "best": None, "last": None, "status": "killed",
    }  # fmt: skip
    assert (found["runs/bare"]["status"], found["runs/bare"]["step"]) == ("unknown", 7)
    assert json.loads(lra("runs", "runs/tiny", "--json").out)[0]["status"] == "finished"
    assert all(word in table for word in (*found, "2 of 4", "stopped", "running", f"{min(scores):.4f}"))


@pytest.mark.parametrize(
    "record",
    [
        "{",
        "[]",
        '{"starts": {"a": 1}}',
        '{"starts": [3]}',
        '{"starts": [{"config": 1}]}',
        '{"status": 5}',
        '{"steps": "x"}',
    ],
)
def test_a_record_that_was_written_over_costs_its_own_columns_only(lra, record):
    run = Path("runs/broken")
    run.mkdir(parents=True)
    (run / "config.gin").touch()
    (run / "record.json").write_text(record, encoding="utf-8")
    line = '{"step": 2, "split": "valid", "bits_per_byte": %s}\n'
    (run / "metrics.jsonl").write_text("".join(line % value for value in ('"x"', "NaN", "2.5")), encoding="utf-8")
    (found,) = json.loads(lra("runs", "--json").out)
    assert (found["status"], found["step"], found["best"], found["last"]) == ("unknown", 2, 2.5, 2.5)
    assert lra("runs").status == 0


def test_listing_never_keeps_a_run_from_starting(trained, lra):
    """`lra runs` holds the lock for a moment; a start waits that long."""
    import fcntl
    import threading

    with (trained / "lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        threading.Timer(0.1, fcntl.flock, (file, fcntl.LOCK_UN)).start()
        with folder.claim(trained, (trained / "config.gin").read_text(encoding="utf-8"), config.difference):
            pass
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)


# lra config --diff


def test_configurations_side_by_side(trained, lra):
    same = lra("config", "tiny.gin", "--diff", "runs/tiny")
    assert (same.status, same.out, same.err) == (0, "", "")
    flags = ["--set", "WIDTH=24", "--attention", "full"]
    result = lra("config", "tiny.gin", *flags, "--diff", "runs/tiny")
    assert (result.status, result.err) == (0, "")
    assert result.out.splitlines()[:2] == [
        "Decoder.pattern: @Full -> @SlidingWindow", "Decoder.width: 24 -> 16",
    ]  # fmt: skip
    assert "SlidingWindow.window: (absent) -> 5" in result.out
    changed = json.loads(lra("config", "tiny.gin", *flags, "--diff", "runs/tiny", "--json").out)
    assert changed["Decoder.width"] == {"this": "24", "other": "16"}
    assert changed["SlidingWindow.window"] == {"this": None, "other": "5"}


def test_a_run_is_compared_as_it_was_recorded(trained, lra):
    text = (trained / "config.gin").read_text(encoding="utf-8")
    (trained / "config.gin").write_text(text.replace("Adam.b1 = 0.9", "Adam.b1 = 0.8"), encoding="utf-8")
    Path("book.txt").unlink()  # a run may be compared without its text
    assert lra("config", "runs/tiny", "--diff", "runs/tiny").out == ""
    assert "there is no configuration" in lra("config", "runs/tiny", "--diff", "nothing").err
