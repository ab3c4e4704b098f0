"""What each command does when all is well."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from lra import config
from lra.attention import PATTERNS, Promise
from lra.evaluation.reference import compressed
from lra.training.checkpoints import Checkpoints
from lra.training.clock import MACHINE
from tests.cli.conftest import LAYERS

ROOT = Path(__file__).parents[2]
ATTENTIONS = sorted(path.stem for path in (config.CONFIGS / "attention").glob("*.gin"))
SMALL = ("WIDTH=16", "HEADS=4", "SEGMENT=16", "BATCH=2", "STEPS=1", "WARMUP=1", "Carried.streams=2")
FITTED = {
    "python_source/reformer": ("AxialPositions.widths=(8, 8)", "CHUNK=4"),
    "python_source/routing": ("CLUSTERS=4", "MEMBERS=4"),
    "wikitext103_head/transformer_xl": (
        "WORDS='words'", "AdaptiveEmbedding.cutoffs=(3, 5, 7)", "AdaptiveEmbedding.div_value=2",
    ),
}  # fmt: skip
"""What else has to be small in a configuration."""
WITH_MEMORY = (
    "python_source/adaptive_span", "python_source/compressive", "python_source/recurrence",
    *(name for name in config.names() if name.endswith("/transformer_xl")),
)  # fmt: skip
PATH = ("--set", "text_file.path='book.txt'")


def metrics(run: Path) -> list[dict]:
    """All that `metrics.jsonl` holds and that does not depend on the machine."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [{name: value for name, value in line.items() if name not in MACHINE} for line in lines]


def arrays(run: Path, step: int) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint by path."""
    experiment = config.build(config.load(run))
    with Checkpoints(run / "checkpoints") as checkpoints:
        state = checkpoints.restore(step, experiment.abstract_state)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(state)}


def same_arrays(first: Path, second: Path, step: int) -> bool:
    a, b = arrays(first, step), arrays(second, step)
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def reads(visible: list[list[int]]) -> list[set[int]]:
    """Which keys each query reads."""
    return [{key for key, seen in enumerate(row) if seen} for row in visible]


def sets(flags: list[str]) -> tuple[str, ...]:
    return tuple(item for flag in flags for item in ("--set", flag))


# train


def test_a_run_learns_and_leaves_its_configuration_metrics_and_checkpoint(trained):
    names = {"config.gin", "record.json", "metrics.jsonl", "checkpoints", "lock"}
    assert {path.name for path in trained.iterdir()} == names
    lines = metrics(trained)
    kinds = [(line["step"], line["split"]) for line in lines]
    assert kinds == [(0, "memory"), *((n, "train") for n in (1, 2, 3, 4)), (4, "valid")]
    assert lines[4]["bits_per_byte"] < lines[1]["bits_per_byte"] < 8.1
    assert [path.name for path in (trained / "checkpoints").iterdir()] == ["4"]


def test_the_same_command_again_finds_nothing_to_do(trained, lra):
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    result = lra("train", "tiny.gin", "--json")
    assert result.status == 0
    assert "nothing to do" in result.err
    assert {name: json.loads(result.out)[name] for name in ("step", "steps_done")} == {"step": 4, "steps_done": 0}
    assert {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()} == before


def test_a_run_that_was_stopped_and_resumed_equals_one_that_was_not(trained, lra):
    first = lra("train", "tiny.gin", "--workdir", "other", "--steps", "2", "--json")
    assert json.loads(first.out)["step"] == 2
    second = lra("train", "tiny.gin", "--workdir", "other", "--json")
    assert {name: json.loads(second.out)[name] for name in ("step", "steps_done")} == {"step": 4, "steps_done": 2}
    unbroken = metrics(trained)
    resumed = [line for line in metrics(Path("other")) if (line["step"], line["split"]) != (2, "valid")]
    assert resumed == unbroken
    assert same_arrays(Path("other"), trained, 4)


def test_a_run_folder_stands_for_its_configuration(trained, lra):
    assert "runs/tiny is at step 4 already" in lra("train", "runs/tiny").err
    assert [path.name for path in Path("runs").iterdir()] == ["tiny"]


def test_another_seed_gives_another_run_and_the_same_seed_the_same(lra):
    for workdir, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        assert lra("train", "tiny.gin", "--workdir", workdir, "--steps", "1", "--seed", seed).status == 0
    assert metrics(Path("a")) == metrics(Path("b")) != metrics(Path("c"))
    assert same_arrays(Path("a"), Path("b"), 1)


def test_a_profile_and_a_compile_cache_are_written_where_they_belong(lra):
    flags = ["--profile", "2:2", "--compile-cache", "programs"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [sys.executable, "-m", "lra.cli", "train", "tiny.gin", "--steps", "2"]
    for workdir, compiles in (("first", True), ("second", False)):
        whole = [*command, "--workdir", workdir, *flags]
        done = subprocess.run(whole, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        (trace,) = Path(workdir, "profile").rglob("perfetto_trace.json.gz")
        assert str(trace) in done.stderr
        lines = map(json.loads, Path(workdir, "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        counts = [line["compilations"] for line in lines if line["split"] == "train"]
        assert counts == ([1, 1] if compiles else [0, 0])  # the step, once
    assert any(Path("programs").iterdir())


def test_another_attention_is_announced_and_trained(lra):
    result = lra("train", "tiny.gin", "--attention", "full", "--workdir", "full", "--steps", "1", "--json")
    assert result.err.startswith("sliding_window replaced by full in Decoder.pattern")
    assert json.loads(result.out)["valid"]["bits_per_byte"] < 9
    assert "Decoder.pattern = @Full\n" in Path("full/config.gin").read_text(encoding="utf-8")


# eval


@pytest.mark.parametrize("protocol", ["block", "carried"])
def test_a_report_says_what_it_counts(trained, lra, protocol):
    result = lra("eval", "tiny.gin", "--protocol", protocol, "--json")
    report = json.loads(result.out)
    test_bytes = int(Path("book.txt").stat().st_size * 0.05)
    expected = {
        "corpus": "text_file", "split": "test", "protocol_name": protocol, "tokens_scored": test_bytes,
        "tokens_expected": test_bytes, "bytes": test_bytes, "partial": False, "step": 4,
    }  # fmt: skip
    assert {name: report[name] for name in expected} == expected
    assert report["protocol"].startswith(f"{protocol}, s")
    assert report["bits_per_byte"] == pytest.approx(report["nats_per_token"] / math.log(2))
    assert 4 < report["bits_per_byte"] < 8.1
    assert 0 < report["reference_bits_per_byte"]["gzip -9"] < 8
    table = lra("eval", "tiny.gin", "--protocol", protocol).out
    assert f"{report['bits_per_byte']:.4f}" in table
    assert f"{test_bytes} of {test_bytes}" in table
    assert "partial" not in table
    assert report["corpus_description"] in table


def test_the_first_protocol_and_the_test_split_are_the_defaults(trained, lra):
    assert json.loads(lra("eval", "runs/tiny", "--json").out)["protocol_name"] == "block"
    line = metrics(trained)[-1]
    report = json.loads(lra("eval", "--workdir", "runs/tiny", "--split", "valid", "--json").out)
    assert report["nats_per_token"] == pytest.approx(line["loss_nats"], rel=1e-6)


def test_a_score_of_a_part_is_labelled(trained, lra):
    result = lra("eval", "tiny.gin", "--partial", "20")
    assert "text_file test at step 4 (partial)" in result.out
    report = json.loads(lra("eval", "tiny.gin", "--partial", "20", "--json").out)
    assert (report["partial"], report["tokens_scored"], report["bytes"]) == (True, 20, 20)
    text = Path("book.txt").read_bytes()
    begin = len(text) - report["tokens_expected"]
    assert report["reference_bits_per_byte"] == compressed(text[begin : begin + 20])


def test_where_attention_goes_stands_beside_the_score(trained, lra):
    flags = ["--partial", "50", "--by", "distance"]
    result = lra("eval", "tiny.gin", *flags, "--png", "by.png", "--json")
    report = json.loads(result.out)
    by = report["by"]["distance"]
    assert (by["queries"], by["bins"]["count"], [layer["layer"] for layer in by["layers"]]) == (50, 16, [0, 1])
    weight = np.asarray([layer["weight"] for layer in by["layers"]])
    assert weight.shape == (2, 2, 16)
    np.testing.assert_allclose(weight.sum(-1), 1, atol=1e-5)
    assert (weight[..., 5:] == 0).all()  # the window
    assert "drawing written to by.png" in result.err
    caption = "runs/tiny at step 4 (last weights); text_file test, 50 of "
    assert caption.encode() in Path("by.png").read_bytes()
    text = lra("eval", "tiny.gin", *flags).out
    assert f"{report['bits_per_byte']:.4f}" in text
    (row,) = (line for line in text.splitlines() if line.startswith("│     1 │"))
    assert f" {by['layers'][1]['largest_effective_distance']:.1f} │" in row


def test_the_score_by_frequency_and_by_position_adds_up(trained, lra):
    report = json.loads(lra("eval", "tiny.gin", "--partial", "50", "--by", "frequency", "--json").out)
    buckets = report["by"]["frequency"]["buckets"]
    assert [bucket["occurrences"] for bucket in buckets] == [">10K", "1K-10K", "100-1K", "<100"]
    assert sum(bucket["tokens"] for bucket in buckets) == 50
    assert sum(bucket["nats_total"] for bucket in buckets) == pytest.approx(report["nats_total"], rel=1e-9)
    by = json.loads(lra("eval", "tiny.gin", "--partial", "50", "--by", "position", "--json").out)["by"]["position"]
    assert by["tokens"] == [4] * 2 + [3] * 14
    total = np.dot(by["tokens"], by["nats_per_token"])
    assert total == pytest.approx(report["nats_total"], rel=1e-9)


def test_a_group_is_compared_by_context(trained, lra):
    shutil.copytree(trained, trained.with_name("twin"))
    flags = ["--by", "context", "--contexts", "4:8", "--group", "runs/twin", "--partial", "10"]
    result = lra("eval", "tiny.gin", *flags, "--png", "by.png", "--json")
    report = json.loads(result.out)
    by = report["by"]["context"]
    assert (by["lengths"], by["targets"], report["tokens_scored"], report["partial"]) == ([4, 8], 10, 18, True)
    assert report["protocol_name"] is None  # windows that no protocol of the run has
    ours, twin = by["runs"]
    assert (ours.pop("run"), twin.pop("run")) == ("runs/tiny", "runs/twin")
    assert ours == twin
    assert [each["share"] for each in ours["relative_effective_context_length"]] == [0.1, 0.5, 1.0]
    assert "runs/tiny at step 4" in Path("by.png").read_bytes().decode("latin-1")
    assert not (trained / "evaluations").exists()
    table = lra("eval", "tiny.gin", *flags).out
    assert f"{ours['nats_per_token'][1]:.4f}" in table
    assert "effective, r = 0.1" in table


def test_the_run_counts_and_not_the_shipped_configuration_of_its_name(trained, lra):
    trained.rename("text_file")
    assert json.loads(lra("eval", "--workdir", "text_file", "--json").out)["step"] == 4


def test_a_checkpoint_may_be_chosen(lra):
    flags = ["Training.evaluate_every = 1", "Training.keep_best = 1", "LEARNING_RATE = 0.05"]
    assert lra("train", "tiny.gin", *sets(flags)).status == 0
    scores = {line["step"]: line["bits_per_byte"] for line in metrics(Path("runs/tiny")) if line["split"] == "valid"}
    best = min(scores, key=scores.get)
    chosen = {"newest": 4, "best": best, str(best): best}
    for command in (["eval", "--json", "--partial", "20"], ["generate", "--json", "--prompt", "x", "--tokens", "1"]):
        for which, step in chosen.items():
            assert json.loads(lra(*command, "tiny.gin", "--checkpoint", which).out)["step"] == step


def test_a_damaged_checkpoint_is_named_and_passed_over(lra):
    assert lra("train", "tiny.gin", "--set", "Training.checkpoint_every = 2").status == 0
    (Path("runs/tiny/checkpoints/4") / "meta" / "metadata").write_bytes(b"")
    for command in (["eval", "tiny.gin", "--json"], ["generate", "tiny.gin", "--json", "--prompt", "x"]):
        result = lra(*command)
        assert json.loads(result.out)["step"] == 2
        assert result.err.endswith("checkpoints/4 is damaged at meta/metadata: going on with step 2\n")


# generate


def test_the_same_seed_gives_the_same_text(trained, lra):
    texts = [lra("generate", "runs/tiny", "--prompt", "ten", "--tokens", "5", "--seed", s).out for s in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("ten")
    result = json.loads(lra("generate", "tiny.gin", "--prompt", "ten", "--tokens", "5", "--seed", "1", "--json").out)
    assert texts[0] == f"ten{result['text']}\n"
    assert (result["prompt"], result["seed"], result["step"]) == ("ten", 1, 4)


@pytest.mark.parametrize("prompt", ["", "é 😀", "far more than one segment of the model holds " * 3])
def test_any_prompt_is_continued(trained, lra, prompt):
    result = lra("generate", "tiny.gin", "--prompt", prompt, "--tokens", "3", "--temperature", "0", "--json")
    assert json.loads(result.out)["prompt"] == prompt
    assert result.status == 0


# config and params


@pytest.mark.parametrize("name", ["tiny.gin", "runs/tiny"])
def test_a_resolved_configuration_resolves_to_itself(trained, lra, name):
    text = lra("config", name).out
    assert text == (trained / "config.gin").read_text(encoding="utf-8")
    Path("again.gin").write_text(text, encoding="utf-8")
    assert lra("config", "again.gin").out == text
    values = json.loads(lra("config", name, "--json").out)
    assert text.replace("\n\n", "\n") == "".join(f"{key} = {value}\n" for key, value in values.items())
    assert values["SlidingWindow.window"] == "5"


def test_an_override_shows_in_the_configuration(lra):
    values = json.loads(lra("config", "tiny.gin", *sets(["WIDTH=24", "Adam.b1 = 0.5"]), "--json").out)
    assert (values["Decoder.width"], values["Adam.b1"]) == ("24", "0.5")


def test_another_attention_changes_the_pattern_and_nothing_else(lra):
    before, after = (json.loads(lra("config", *more, "--json").out) for more in ([], ["--attention", "full"]))
    assert (before.pop("Decoder.pattern"), after.pop("Decoder.pattern")) == ("@SlidingWindow", "@Full")
    window = {key for key in before if key.startswith("SlidingWindow.")}
    assert window == {f"SlidingWindow.{name}" for name in ("window", "window_right", "dilation")}
    assert after == {key: value for key, value in before.items() if key not in window}
    text = lra("config", "--attention", "full").out
    assert text.startswith("# sliding_window replaced by full in Decoder.pattern; removed SlidingWindow.window")


@pytest.mark.parametrize(
    ("flags", "replaced"),
    [
        (["Optimizer.schedule=@Constant", "Constant.learning_rate=%LEARNING_RATE"], "Cosine"),
        (["Experiment.data=@Streams", "Streams.segment=%SEGMENT", "Streams.batch_size=3"], "Windows"),
    ],
)
def test_what_is_included_for_a_class_that_is_replaced_is_no_mistake(lra, flags, replaced):
    assert f"{replaced}." in lra("config", "tiny.gin").out
    result = lra("config", "tiny.gin", *sets(flags))
    assert result.status == 0, result.err
    assert f"{replaced}." not in result.out


def test_parameters_by_module_add_up(lra):
    counts = json.loads(lra("params", "tiny.gin", "--json").out)
    assert counts["total"] == sum(counts["modules"].values())
    width, layers = 16, 2
    norms, attention, feed_forward = 4 * width, 4 * width**2, 8 * width**2 + 5 * width
    assert counts["total"] == 256 * width + layers * (norms + attention + feed_forward) + 2 * width
    table = lra("params", "tiny.gin").out
    assert f"tiny.gin: {counts['total']:,} parameters" in table
    assert all(name in table for name in counts["modules"])


# attention


def test_the_list_has_every_pattern_with_its_promises(lra):
    rows = {row["name"]: row for row in json.loads(lra("attention", "list", "--json").out)}
    assert rows.keys() == PATTERNS.keys()
    assert rows["sliding_window"]["causal"] == "strict"
    assert "2004.05150" in rows["sliding_window"]["about"]
    table = lra("attention", "list").out
    assert all(name in table for name in PATTERNS)


@pytest.mark.parametrize(
    ("arguments", "golden"),
    [
        ("full --length 3", 3 * [[{0}, {0, 1}, {0, 1, 2}]]),
        ("full --length 2 --bidirectional", 3 * [[{0, 1}, {0, 1}]]),
        ("sliding_window --length 6", 3 * [[{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}, {1, 2, 3, 4, 5}]]),
        ("sliding_window --length 7 --example 1", 3 * [[{0}, {1}, {2}, {0, 3}, {1, 4}, {2, 5}, {0, 3, 6}]]),
        (
            "sliding_window --length 6 --example 2 --bidirectional",
            3 * [[{0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4, 5}, {1, 2, 3, 4, 5}, {2, 3, 4, 5}]],
        ),
        ("heads --length 3", [[{0}, {0, 1}, {0, 1, 2}], *2 * [[{0}, {1}, {2}]]]),
        ("tiny.gin --length 6", 2 * [[{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}, {1, 2, 3, 4, 5}]]),
        ("runs/tiny --length 1 --layer 1", 2 * [[{0}]]),
    ],
)
def test_a_drawing_shows_who_reads_whom(trained, lra, arguments, golden):
    result = json.loads(lra("attention", "show", *arguments.split(), "--json").out)
    assert [reads(head) for head in result["visible"]] == golden
    assert result["length"] == len(golden[0])


def test_a_drawing_of_a_layer(lra):
    flags = [*sets(["SlidingWindow.window=(1, 2)"]), "--length", "3", "--json"]
    text = Path("tiny.gin").read_text(encoding="utf-8")
    Path("layers.gin").write_text(text.replace("WINDOW = 5\n", ""), encoding="utf-8")  # it would have no effect
    first, second = (json.loads(lra("attention", "show", "layers.gin", "--layer", i, *flags).out) for i in "01")
    assert reads(first["visible"][0]) == [{0}, {1}, {2}]
    assert reads(second["visible"][0]) == [{0}, {0, 1}, {1, 2}]


def test_a_drawing_in_the_terminal(lra):
    title, empty, heads, *rows = lra("attention", "show", "full", "--length", "2").out.splitlines()
    assert (title, empty, heads) == ("full, causal", "", "all heads: 3 of 4 pairs, sparsity 0.250")
    assert rows == ["██·", "████"]


def test_a_drawing_through_the_layers_of_a_pattern(lra):
    result = json.loads(lra("attention", "show", "sliding_window", "--layers", "2", "--length", "12", "--json").out)
    (grid,) = result["visible"]
    assert reads(grid) == [{*range(max(0, p - 8), p + 1)} for p in range(12)]
    assert result["sparsity"] == [1 - 72 / 144]
    assert result["title"] == "sliding_window(window=5), causal, 2 layers"


ALTERNATING = """
include "base.gin"
include "data/streams.gin"

LAYERS = 4
WIDTH = 16
HEADS = 2
SEGMENT = 16
BATCH = 2
Experiment.corpus = @text_file
text_file.path = 'book.txt'
Decoder.pattern = (@near/Strided, @far/Strided)
near/Strided.stride = 3
near/Strided.part = "local"
far/Strided.stride = 3
far/Strided.part = "column"
Decoder.memory = @Recurrence
Recurrence.length = 5
"""


def test_a_drawing_through_layers_that_alternate(lra):
    Path("alternating.gin").write_text(ALTERNATING, encoding="utf-8")

    def grid(*flags):
        result = json.loads(lra("attention", "show", "alternating.gin", "--length", "8", *flags, "--json").out)
        assert len(result["visible"]) == (1 if "--layers" in flags else 2)
        return reads(result["visible"][0])

    near = [{s for s in (p, p - 1, p - 2) if s >= 0} for p in range(8)]
    far = [{s for s in (p, p - 3, p - 6) if s >= 0} for p in range(8)]
    assert (grid(), grid("--layer", "1"), grid("--layer", "2")) == (near, far, near)
    assert (grid("--layers", "1"), grid("--layer", "3", "--layers", "1")) == (near, far)
    assert grid("--layers", "2") == grid("--layer", "1", "--layers", "2") == [{*range(p + 1)} for p in range(8)]
    title = lra("attention", "show", "alternating.gin", "--layer", "1", "--layers", "2").out.splitlines()[0]
    assert title == "alternating.gin, layers 1 to 2: Strided, Strided"


def test_a_drawing_of_memory_as_it_fills(lra):
    Path("alternating.gin").write_text(ALTERNATING, encoding="utf-8")
    command = ["attention", "show", "alternating.gin", "--layer", "1", "--segments", "3", "--length", "3"]
    result = json.loads(lra(*command, "--json").out)
    filled = [segment["filled"] for segment in result["segments"]]
    assert filled == [[False] * 5, [False] * 2 + [True] * 3, [True] * 5]
    # Columns 0-4 are slots, 5-7 the segment: a query at 5, 6, 7 reads every third of those that are filled.
    third = [{2, 5}, {0, 3, 6}, {1, 4, 7}]
    want = [[{5}, {6}, {7}], [{2, 5}, {3, 6}, {4, 7}], third]
    assert [[reads(head) for head in segment["visible"]] for segment in result["segments"]] == [2 * [w] for w in want]
    text = lra(*command).out
    assert text.startswith(
        "alternating.gin, layer 1: Strided, Recurrence\n\nsegment 1, 0 of 5 slots filled, all heads: 3"
    )
    assert text.endswith("· · ██· · │██· ·\n██· · ██· │· ██·\n· ██· · ██│· · ██\n")


def test_a_drawing_as_png(lra):
    pytest.importorskip("matplotlib")
    result = lra("attention", "show", "heads", "--length", "8", "--png", "heads.png", "--json")
    assert Path("heads.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads(result.out)["visible"]) == 3
    assert "heads.png" in result.err


# bench

SMALL_BENCH = ("--heads", "2", "--head-dim", "3", "--batch", "2", "--repeat", "2")


def test_a_benchmark_has_a_row_for_each_pattern_length_and_pass(lra):
    texts = ["sliding_window(window=3)", "full"]
    result = lra("bench", *texts, "--length", "5", "7", "--against", "jax", *SMALL_BENCH, "--json")
    assert (result.status, result.err) == (0, "")
    report = json.loads(result.out)
    rows = [(row["pattern"], row["length"], row["pass"]) for row in report["rows"]]
    passes = ("forward", "forward + backward")
    assert rows == [(name, length, kind) for length in (5, 7) for name in ("jax", *texts) for kind in passes]
    assert {name: report[name] for name in ("num_heads", "head_dim", "batch", "repeat", "causal", "against")} == {
        "num_heads": 2, "head_dim": 3, "batch": 2, "repeat": 2, "causal": True, "against": "jax",
    }  # fmt: skip
    assert all(row["milliseconds"] > 0 and row["compile_seconds"] > 0 for row in report["rows"])
    table = lra("bench", *texts, "--length", "5", *SMALL_BENCH).out
    assert all(word in table for word in (*texts, "+ backward", "against full"))


@pytest.fixture
def patterns():
    """The registry, which is as it was afterwards, in its order too."""
    before = dict(PATTERNS)
    yield PATTERNS
    PATTERNS.clear()
    PATTERNS.update(before)


@pytest.mark.parametrize(
    "registered", [("full", "blockwise"), pytest.param(tuple(PATTERNS), marks=pytest.mark.slow)], ids=["two", "all"]
)
def test_every_pattern_is_measured_but_those_without_the_form(lra, patterns, registered):
    """`tests/test_bench.py` builds every pattern with the arguments that it is measured with."""

    class OneWay(PATTERNS["full"]):
        promise = Promise(causal="strict")

    for name in patterns.keys() - set(registered):
        del patterns[name]
    patterns["one_way"] = OneWay
    report = json.loads(lra("bench", "--length", "5", *SMALL_BENCH, "--bidirectional", "--json").out)
    measured = {row["pattern"].partition("(")[0] for row in report["rows"]}
    assert measured == set(registered)
    (skipped,) = report["skipped"]
    assert skipped.startswith("one_way: OneWay has no bidirectional form")
    del patterns["blockwise"]
    assert "skipped one_way: " in lra("bench", "--length", "5", *SMALL_BENCH, "--bidirectional").err
    named = lra("bench", "one_way", "--length", "5", *SMALL_BENCH, "--bidirectional")
    assert (named.status, named.out) == (2, "")
    assert named.err.startswith("lra: one_way: OneWay has no bidirectional form")


# shipped configurations


@pytest.fixture
def small_library(monkeypatch, tmp_path):
    """Stands in for the standard library of `python_source`."""
    for n in range(60):
        (tmp_path / "lib").mkdir(exist_ok=True)
        (tmp_path / "lib" / f"module_{n}.py").write_text(f'"""Module {n}."""\n\nNUMBER = {n}\n', encoding="utf-8")
    monkeypatch.setattr("lra.data.python_source._root", lambda: tmp_path / "lib")


@pytest.mark.parametrize("name", config.names())
def test_a_shipped_configuration_trains(small_library, heads, lra, name):
    path = PATH if "text_file" in name else ()
    small = (f"LAYERS={LAYERS.get(name, 1)}", *SMALL, *FITTED.get(name, ()))
    if name.startswith("duplication"):  # which carries nothing from example to example
        small = tuple(each for each in small if not each.startswith("Carried"))
    result = lra("train", name, *path, *sets(small), "--workdir", "run", "--json")
    assert result.status == 0, result.err
    assert json.loads(result.out)["step"] == 1
    assert math.isfinite(json.loads(result.out)["valid"]["bits_per_byte"])


def swaps():
    """Each attention in the quickstart, each configuration with two, and what is refused; the others are slow."""
    refused = [(name, each) for name in ("python_source/memory_compressed", "python_source/recurrence")
               for each in ("fixed_layers", "longformer", "window_global", "blockwise")]  # fmt: skip
    for n, name in enumerate(config.names()):
        for m, attention in enumerate(ATTENTIONS):
            usual = name == "quickstart" or attention == "full" or m == n % len(ATTENTIONS)
            marks = () if usual or (name, attention) in refused else pytest.mark.slow
            yield pytest.param(name, attention, marks=marks)


@pytest.mark.parametrize(("name", "attention"), list(swaps()))
def test_every_attention_fits_into_a_shipped_configuration_or_says_why_not(heads, lra, name, attention):
    path = PATH if "text_file" in name else ()
    result = lra("config", name, *path, "--attention", attention, "--json")
    text = (config.CONFIGS / "attention" / f"{attention}.gin").read_text(encoding="utf-8")
    bound = dict(line.split(" = ") for line in text.splitlines() if "." in line.split(" = ")[0] and line[0] != "#")
    if attention == "blockwise" or (name == "python_source/memory_compressed" and "," in bound["Decoder.pattern"]):
        assert result.status == 2
        assert "no causal form" in result.err or "a number of entries that divides 5 layers" in result.err
    elif name == "python_source/memory_compressed" and attention == "longformer":
        assert result.status == 2
        assert "one entry for each of 5 layers" in result.err
    elif name in WITH_MEMORY and attention in ("routing", "window_global"):
        assert result.status == 2
        assert "does not promise memory" in result.err
    else:
        assert result.status == 0, result.err
        values = json.loads(result.out)
        assert values["Decoder.pattern"] == bound["Decoder.pattern"]
        last = {key.split("/")[-1] for key in values}  # a binding without a scope shows in every scope
        assert {key.split("/")[-1] for key in bound} <= last


# as a process


def test_stdout_is_one_json_object_and_stderr_empty_in_a_process_of_its_own(trained):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"}
    command = [sys.executable, "-m", "lra.cli", "eval", "tiny.gin", "--json"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["step"] == 4
    assert result.stdout.count("\n") == 1
