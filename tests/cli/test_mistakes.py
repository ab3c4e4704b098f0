"""A user's mistake is one sentence on stderr and status 2, before anything is written."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from lra import config, scoring
from lra.errors import Interrupted, UserError

ROOT = Path(__file__).parents[2]


def contents(folder: Path) -> dict[Path, bytes | None]:
    """Everything under a folder."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def refused(lra, workplace) -> Callable[..., None]:
    """Runs a command that must be refused: status 2, one line that holds the words, nothing written."""

    def run(arguments: list[str], *words: str) -> None:
        before = contents(workplace)
        result = lra(*arguments)
        assert (result.status, result.out) == (2, ""), result
        assert result.err.startswith("lra: ")
        assert result.err.count("\n") == 1, result.err
        assert "Traceback" not in result.err
        missing = [word for word in words if word not in result.err]
        assert not missing, result.err
        assert contents(workplace) == before

    return run


# arguments


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "COMMAND lra --help"),
        ("trian", "'trian' train eval"),
        ("train --steps many", "--steps 'many' lra train --help"),
        ("train --stops 3", "--stops"),
        ("eval --split dev", "'dev' train valid test"),
        ("generate", "--prompt"),
        ("attention", "COMMAND"),
    ],
)
def test_arguments_that_cannot_be_parsed(refused, command, words):
    refused(command.split(), *words.split())


# configurations


@pytest.mark.parametrize("command", ["train", "config", "params", "cost"])
def test_an_unknown_configuration(refused, command):
    refused([command, "quikstart"], "no configuration", "'quikstart'", "did you mean quickstart?")
    refused([command, "zzz"], "'zzz'", "there are", "quickstart", "text_file")


def test_a_folder_without_a_run(refused, workplace):
    (workplace / "empty").mkdir()
    refused(["train", "empty"], "the folder empty holds no config.gin", "name a run folder")


@pytest.mark.parametrize(
    ("binding", "words"),
    [
        ("Decoder.widht = 8", ["Decoder.widht = 8 (--set)", "did you mean width?"]),
        ("Decodr.width = 8", ["Decodr", "did you mean Decoder?"]),
        ("LAYRES = 3", ["LAYRES = 3 (--set) has no effect", "did you mean LAYERS?"]),
        ("Adam.learning_rate = 0.1", ["a parameter that Adam does not have", "Constant, Cosine"]),
        ("Decoder.width = 'wide'", ["Decoder.width (--set) needs int, got 'wide'"]),
        ("Decoder.width = wide", ["wide is no value", "quotes"]),
        (
            "STEPS = 1e5",
            ["Training.steps", "needs int, got 100000.0 (float): write 100_000", "STEPS = 100000.0 (--set)"],
        ),
        ("STEPS = -4", ["Training.steps is -4", "at least 1"]),
        ("DROPOUT = 1.5", ["Stack.dropout", "below 1, got 1.5"]),
        ("Optimizer.clip_norm = 0", ["Optimizer.clip_norm is 0", "above 0"]),
        ("SEED = -1", ["Experiment.seed is -1", "at least 0"]),
        ("HEADS = 3", ["Decoder.num_heads=3 does not divide Decoder.width=16"]),
        ("WINDOW = 0", ["window", "at least 1, got 0"]),
        ("SEGMENT = 0", ["segment is 0", "at least 1"]),
        ("WARMUP = 5", ["Cosine.warmup is 5 steps", "Training.steps = 4"]),
        ("Cosine.unit = 'weeks'", ["Cosine.unit", "one of 'steps', 'tokens', 'epochs'"]),
        ("WARMUP = 0.5", ["Cosine.warmup is 0.5", "an integer", "the unit is steps"]),
        ("Cosine.unit = 'tokens'", ["Cosine.warmup is 1", "as much as one step, which is 32 tokens"]),
        ("Training.accumulate = 3", ["Training.accumulate is 3", "divide the 2 rows", "Windows.batch_size"]),
        ("Training.evaluate_weights = 'ema'", ["no moving average", "Optimizer.ema_decay"]),
        ("Training.non_finite = 'ignore'", ["Training.non_finite", "'stop', 'skip', 'rewind'"]),
        ("Training.non_finite_limit = 0", ["Training.non_finite_limit is 0", "at least 1"]),
        ("Decoder.compute_dtype = 'half'", ["Decoder.compute_dtype", "'bfloat16'"]),
        ("FeedForward.compute_dtype = 'bfloat16'", ["FeedForward.compute_dtype", "the program passes"]),
        ("Optimizer.ema_decay = 1.0", ["Optimizer.ema_decay is 1.0", "between 0 and 1"]),
        ("Optimizer.groups = (@Group,)", ["Group.pattern has no value"]),
        ("Adafactor.momentum = 0.9", ["Adafactor.momentum = 0.9 (--set) has no effect", "builds no Adafactor"]),
        ("far/SlidingWindow.window = 3", ["far/SlidingWindow.window = 3 (--set) has no effect", "scope"]),
        ("FeedForward.activation = 'gleu'", ["FeedForward.activation", "did you mean", "'g"]),
        ("Decoder.memory = @Recurrnce", ["Recurrnce", "did you mean Recurrence?"]),
        ("Decoder.width", ["--set 'Decoder.width'", "cannot be read", "'='"]),
        ("", ["--set ''", "write one Name.parameter = value"]),
    ],
)
def test_a_binding_that_does_not_fit(refused, binding, words):
    refused(["train", "tiny.gin", "--set", binding], *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("WIDTH = 16\ninclude 'quickstart.gin'", ["mine.gin:1", "base.gin:", "move the include up"]),
        ("include 'quickstart.gin'\nWIDTH = 16\nWIDTH = 24", ["mine.gin:2", "mine.gin:3", "remove one"]),
        ("include 'quickstart.gin'\nLinear.final = 0.1", ["Linear.final = 0.1 (mine.gin:2) has no effect"]),
        ("include 'quickstar.gin'", ["mine.gin:1", "'quickstar.gin'"]),
        ("include 'quickstart.gin'\nWIDTH = (16", ["mine.gin:2", "left open"]),
        (
            "include 'base.gin'\ninclude 'data/windows.gin'\nDecoder.pattern = @near/SlidingWindow\n"
            "SlidingWindow.window = 3\nnear/SlidingWindow.window = 5",
            ["SlidingWindow.window = 3 (mine.gin:4) has no effect", "near/SlidingWindow.window = 5 (mine.gin:5)"],
        ),
    ],
)
def test_a_file_that_contradicts_itself(refused, workplace, text, words):
    (workplace / "mine.gin").write_text(text + "\n", encoding="utf-8")
    refused(["train", "mine.gin"], *words)


def test_two_values_for_one_name(refused):
    refused(["train", "tiny.gin", "--set", "WIDTH = 8", "--set", "WIDTH = 16"], "--set gives WIDTH twice, 8 and 16")


def test_an_unknown_attention_lists_those_that_exist(refused):
    refused(["train", "tiny.gin", "--attention", "fulll"], "'fulll'", "full, ", "sliding_window")


def test_memory_that_a_batch_would_never_reach(refused):
    flags = ["--set", "Decoder.memory = @Recurrence", "--set", "Recurrence.length = 16"]
    refused(["train", "tiny.gin", *flags], "memory", "Windows", "Streams")


# texts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["text file book.txt does not exist"]),
        ("", ["text file book.txt is empty"]),
        ("few", ["has 3 bytes, too few"]),
        ("less than a segment", ["has 19 bytes, too few"]),
        (
            "less than a batch of 32",
            ["21 tokens, but one batch of batch_size 2 and segment 16 needs 32", "longer text"],
        ),
    ],
)
def test_a_text_that_does_not_suffice(refused, workplace, text, words):
    (workplace / "book.txt").unlink()
    if text is not None:
        (workplace / "book.txt").write_text(text, encoding="utf-8")
    refused(["train", "tiny.gin"], *words)


def test_a_text_that_was_not_named(refused):
    refused(["train", "text_file"], "text_file.path", "--set 'text_file.path = ...'")


# runs


def test_a_workdir_that_is_a_file(refused):
    refused(["train", "tiny.gin", "--workdir", "book.txt"], "book.txt is a file", "--workdir")


def test_a_workdir_that_holds_something_else(refused):
    refused(["train", "tiny.gin", "--workdir", "."], "book.txt, tiny.gin", "--workdir")


def test_a_workdir_of_another_configuration(trained, refused):
    flags = ["--seed", "1", "--set", "WIDTH = 32"]
    changes = ["Decoder.width: 16 -> 32", "Experiment.seed: 0 -> 1"]
    refused(["train", "tiny.gin", *flags], "runs/tiny holds a run of another configuration", *changes)


def test_a_recorded_configuration_that_is_no_text(trained, refused):
    (trained / "config.gin").write_bytes(b"Adam.b1 = 0.9\n\xff\n")
    refused(["config", "tiny.gin", "--diff", "runs/tiny"], "configuration:2 cannot be read")
    refused(["train", "tiny.gin"], "configuration:2 cannot be read")


@pytest.mark.parametrize("steps", ["5", "0", "-1"])
def test_steps_that_the_run_does_not_have(trained, refused, steps):
    refused(["train", "tiny.gin", "--steps", steps], f"step {steps}", "steps 1 to 4")


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ("2", ["--profile is '2'", "write --profile 10:12"]),
        ("a:b", ["--profile is 'a:b'", "first and the last step"]),
        ("-1:2", ["--profile is '-1:2'"]),
        ("3:2", ["steps 3 to 2", "steps 1 to 4 are to be done"]),
        ("0:2", ["steps 0 to 2", "steps 1 to 4 are to be done"]),
        ("4:5", ["steps 4 to 5", "steps 1 to 4 are to be done"]),
    ],
)
def test_a_profile_of_steps_that_are_not_done(refused, steps, words):
    refused(["train", "tiny.gin", f"--profile={steps}"], *words)


@pytest.mark.parametrize("folder", ["book.txt", "book.txt/programs"])
def test_a_compile_cache_that_cannot_be(refused, folder):
    refused(["train", "tiny.gin", "--compile-cache", folder], "cannot write to", "book.txt", "--compile-cache")


def test_a_profile_of_steps_that_were_done(half_way, refused):
    refused(["train", "tiny.gin", "--profile", "2:3"], "steps 2 to 3", "steps 3 to 4 are to be done")


@pytest.mark.parametrize("seed", ["-1", str(2**32)])
def test_a_seed_out_of_range(refused, seed):
    refused(["train", "tiny.gin", "--seed", seed], f"Experiment.seed is {seed}", "at least 0 and below")


@pytest.mark.parametrize("command", ["eval", "generate --prompt x"])
def test_a_run_that_does_not_exist(trained, refused, command):
    refused([*command.split(), "tinny"], "no run", "runs/tinny", "did you mean runs/tiny?")
    refused([*command.split(), "zzz"], "runs/zzz", "there are runs/tiny")
    refused([*command.split(), "--workdir", "there"], "no run there:", "there are runs/tiny")


def test_no_run_at_all(refused):
    refused(["eval"], "runs/quickstart", "no runs under runs/ yet", "lra train")


def test_a_run_without_a_checkpoint(trained, refused):
    (trained / "checkpoints").rename("elsewhere")
    refused(["eval", "tiny.gin"], "runs/tiny holds no checkpoint", "lra train")


def test_a_run_of_another_model(trained, refused):
    refused(["eval", "tiny.gin", "--set", "Decoder.width = 32"], "parameters.", "16", "32", "configuration of that run")


def test_a_text_that_changed(trained, refused, workplace):
    path = workplace / "book.txt"
    path.write_text(path.read_text(encoding="utf-8").replace("green", "brown"), encoding="utf-8")
    for command in (["eval", "tiny.gin"], ["train", "tiny.gin"]):
        refused(command, "was trained on text_file (book.txt, digest ", "the corpus is now", "restore the former text")


@pytest.fixture
def half_way(lra, workplace):
    """The checkpoint of a run that was stopped at step 2."""
    assert lra("train", "tiny.gin", "--steps", "2").status == 0
    return workplace / "runs" / "tiny" / "checkpoints" / "2"


@pytest.mark.parametrize("name", ["digests.json", "meta/metadata", "state/_METADATA"])
@pytest.mark.parametrize("command", ["eval", "train"])
def test_a_checkpoint_that_is_cut_off(half_way, refused, name, command):
    path = half_way / name
    path.write_bytes(path.read_bytes()[:-9])
    refused([command, "tiny.gin"], f"checkpoints/2 is damaged at {name}", "no checkpoint is whole", "put back a copy")


def test_a_checkpoint_with_a_flipped_bit(half_way, refused):
    path = max(half_way.rglob("state/ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size)  # arrays, no index
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    refused(["train", "tiny.gin"], "checkpoints/2 is damaged at state/", "no checkpoint is whole", "put back a copy")


@pytest.mark.parametrize(
    ("which", "words"),
    [("3", ["no checkpoint '3'", "of steps 4"]), ("first", ["'first'", "newest, best"]), ("-1", ["'-1'", "steps 4"])],
)
def test_a_checkpoint_that_is_not_there(trained, refused, which, words):
    refused(["eval", "tiny.gin", f"--checkpoint={which}"], *words)


def test_a_folder_that_another_process_trains_in(trained, refused, lra):
    from lra.training import folder

    text = (trained / "config.gin").read_text(encoding="utf-8")
    with folder.claim(trained, text, config.difference):
        refused(["train", "tiny.gin"], "another process is training in runs/tiny", "--workdir")
        assert lra("eval", "tiny.gin").status == 0
    assert lra("train", "tiny.gin").status == 0


def test_no_folder_of_runs(refused):
    refused(["runs"], "there is no folder runs", "lra train")
    refused(["runs", "elsewhere"], "there is no folder elsewhere")


@pytest.mark.parametrize("value", ["1e999", "-1e999", "1j", "b'x'"])
def test_a_value_without_a_literal_form(refused, value):
    refused(["config", "tiny.gin", "--set", f"Stack.dropout = {value}"], "Stack.dropout (--set)")


# evaluation and generation


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--protocol strem", ["'strem'", "there are block, carried"]),
        ("--partial 0", ["0 tokens", "at least 1"]),
        ("--partial -3", ["-3 tokens", "at least 1"]),
        ("--partial 5 --protocol carried", ["Carried.streams is 16", "at most 5"]),
    ],
)
def test_an_evaluation_out_of_range(trained, refused, flags, words):
    refused(["eval", "tiny.gin", *flags.split()], *words)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--by distances", ["no --by 'distances'", "there is context, distance, frequency, position"]),
        ("--png by.png", ["--png draws what --by shows", "add --by", "distance"]),
        ("--by distance --png there/by.png", ["cannot write there/by.png", "No such file", "--png"]),
        ("--by distance --png .", ["cannot write .", "Is a directory", "--png"]),
        ("--group runs/b --by position", ["--group is for", "add --by context", "leave it out"]),
        ("--contexts 2:4", ["--contexts is for", "add --by context"]),
        ("--by context --contexts 4:10", ["--contexts is '4:10'", "a multiple", "--contexts 32:256"]),
        ("--by context --contexts 4:4", ["--contexts is '4:4'", "--contexts 32:256"]),
        ("--by context --contexts 0:0", ["--contexts is '0:0'", "--contexts 32:256"]),
        ("--by context --contexts 4", ["--contexts is '4'", "--contexts 32:256"]),
    ],
)
def test_what_cannot_stand_beside_a_score(refused, flags, words):
    """Before the run is looked for."""
    refused(["eval", "tiny.gin", *flags.split()], *words)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--partial 0", ["0 tokens are to be scored by context", "at least 1"]),
        ("--contexts 1000:4000", ["text_file test has ", "none of which is scored behind 4000 others", "shorter"]),
        ("--group tiny.gin", ["runs/tiny is in the group twice", "once"]),
        ("--group runs/missing", ["there is no run", "runs/missing"]),
    ],
)
def test_a_score_by_context_that_cannot_be(trained, refused, flags, words):
    refused(["eval", "tiny.gin", "--by", "context", *flags.split()], *words)


@pytest.mark.parametrize(
    ("name", "digest", "vocabulary", "words"),
    [
        ("enwik8", "1", "1", "runs/a has corpus text8 (digest 1), but runs/b has enwik8 (digest 1)"),
        ("text8", "2", "1", "runs/a has corpus text8 (digest 1), but runs/b has text8 (digest 2)"),
        ("text8", "1", "2", "runs/a has vocabulary chars (digest 1), but runs/b has chars (digest 2)"),
    ],
)
def test_a_group_that_scores_other_tokens(name, digest, vocabulary, words):
    def scorer(run, name, digest, vocabulary):
        corpus = SimpleNamespace(name=name, digest=digest, vocabulary=SimpleNamespace(name="chars", digest=vocabulary))
        return scoring.Scorer(Path(run), SimpleNamespace(corpus=corpus), "block", None, 1)

    options = SimpleNamespace(by="context", contexts="2:4", partial=None)
    group = [scorer("runs/a", "text8", "1", "1"), scorer("runs/b", name, digest, vocabulary)]
    with pytest.raises(UserError, match=re.escape(words)):
        scoring.score(group, options)


def test_a_score_that_is_not_finite(trained, refused, monkeypatch):
    def fails(*_, **__):
        raise FloatingPointError("the model's score of text_file test is nan after 5 tokens")

    monkeypatch.setattr("lra.scoring.evaluate", fails)
    refused(["eval", "tiny.gin"], "is nan after 5 tokens", "--checkpoint")


@pytest.mark.parametrize(
    "flag", ["tokens=0", "temperature=-1", "temperature=nan", "top-k=0", "top-k=257", "top-p=0", "top-p=1.5", "seed=-1"]
)
def test_a_generation_out_of_range(trained, refused, flag):
    name, _, value = flag.partition("=")
    refused(["generate", "tiny.gin", "--prompt", "x", f"--{flag}"], f"{name.replace('-', '_')} is {value}", "must be")


# drawings


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("slidingwindow", ["no pattern or configuration 'slidingwindow'", "did you mean sliding_window?"]),
        ("zzz", ["there are full, sliding_window", "quickstart"]),
        ("full --length 0", ["--length is 0", "1 to"]),
        ("full --length 1000000", ["--length is 1000000", "1 to"]),
        ("full --example 7", ["full has examples 0 to 0", "--example 7"]),
        ("full --layer 1", ["--layer does not apply to full", "pattern"]),
        ("full --set WIDTH=3", ["--set does not apply to full", "pattern"]),
        ("tiny.gin --layer 2", ["tiny.gin has layers 0 to 1", "--layer 2"]),
        ("tiny.gin --layer -1", ["layers 0 to 1", "--layer -1"]),
        ("full --segments 2", ["--segments does not apply to full", "pattern"]),
        ("full --layers 0", ["--layers is 0", "1 to 2048"]),
        ("full --layers -1", ["--layers is -1", "1 to 2048"]),
        ("tiny.gin --segments 0", ["--segments is 0", "1 to 64"]),
        ("tiny.gin --segments 65", ["--segments is 65", "1 to 64"]),
        ("tiny.gin --segments 2", ["tiny.gin carries no memory", "leave out --segments"]),
        ("tiny.gin --segments 2 --layers 2", ["--layers and --segments", "leave one of them out"]),
        ("tiny.gin --layers 3", ["tiny.gin has at most 2 layers from layer 0 on", "--layers 3", "lower it"]),
        ("tiny.gin --layers 2 --layer 1", ["tiny.gin has at most 1 layers from layer 1 on", "--layers 2", "lower it"]),
        ("full --layers two", ["--layers", "'two'", "lra attention show --help"]),
        ("tiny.gin --bidirectional", ["--bidirectional does not apply to tiny.gin", "configuration"]),
        ("sliding_window --example 2", ["window_right=2", "has no such form", "with --bidirectional"]),
    ],
)
def test_a_drawing_that_cannot_be(refused, command, words):
    refused(["attention", "show", *command.split()], *words)


@pytest.mark.parametrize("command", ["attention show full", "eval tiny.gin --by distance"])
def test_a_png_without_matplotlib(lra, monkeypatch, workplace, command):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = lra(*command.split(), "--png", "a.png")
    assert result.status == 2
    assert result.err == "lra: a PNG needs matplotlib, which is not installed: pip install 'lra[plots]'\n"
    assert not (workplace / "a.png").exists()


# benchmarks


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fulll"], ["no pattern 'fulll'", "did you mean full?"]),
        (["full", "--against", "jaxx"], ["no pattern 'jaxx'", "did you mean jax?"]),
        (["sliding_window(7)"], ["'sliding_window(7)' cannot be read", "NAME(ARGUMENT=VALUE, ...)"]),
        (["sliding_window(window=0)"], ["sliding_window(window=0): window", "at least 1, got 0"]),
        (["heads(groups=((3, full),))"], ["add up to 8 heads, got [3]"]),
        (["full", "--length", "64", "0"], ["--length is 0", "at least 1"]),
        (["full", "--head-dim", "-1"], ["--head-dim is -1", "at least 1"]),
        (["full", "--repeat", "1"], ["--repeat is 1", "at least 2"]),
        (["full", "--length", "long"], ["--length", "'long'", "lra bench --help"]),
    ],
)
def test_a_benchmark_that_cannot_be(refused, arguments, words):
    refused(["bench", *arguments], *words)


# what is no mistake of the user's


def test_an_interruption_is_one_line_and_status_130(lra, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("lra.config.load", interrupt)
    result = lra("config")
    assert (result.status, result.out, result.err) == (130, "", "lra: interrupted\n")


def test_a_run_that_was_stopped_is_one_line_and_the_status_of_its_signal(lra, monkeypatch):
    def stop(*_, **__):
        raise Interrupted("SIGTERM: stopped after step 3, saved in there; run again to go on", 15)

    monkeypatch.setattr("lra.commands.train", stop)
    result = lra("train", "tiny.gin")
    assert (result.status, result.out) == (143, "")
    assert result.err == "lra: SIGTERM: stopped after step 3, saved in there; run again to go on\n"


def test_a_reader_that_has_enough_is_no_crash(workplace):
    script = "import sys; from lra.cli import main; sys.exit(main(['config', 'tiny.gin']))"
    command = [sys.executable, "-c", script]
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": ""}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.wait(timeout=120) == 1
        assert process.stderr.read() == b""
