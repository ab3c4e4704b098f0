"""What each command does, after its arguments are parsed."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lra import bench, config, data_commands, scoring, show, spans, tables
from lra.attention import EXAMPLE_HEADS, PATTERNS, Promise, Site, draw
from lra.errors import UserError
from lra.evaluation import ByContext
from lra.evaluation.reference import compressed
from lra.models import parameters
from lra.models.cost import cost
from lra.models.generation import generate
from lra.scoring import Scorer
from lra.training import Experiment, evaluations, load_model, train
from lra.training.record import summaries
from lra.training.resume import check_corpus

RUNS = Path("runs")
REFERENCE_BYTES = 1 << 24
"""Above this, gzip and xz take longer than they are worth as references."""


def train_command(options: argparse.Namespace) -> None:
    """`lra train`: trains or resumes."""
    profile = None if options.profile is None else _steps(options.profile)
    experiment, loaded = _build(options)
    if options.compile_cache is not None:
        _keep_programs(Path(options.compile_cache).absolute())
    workdir = Path(options.workdir) if options.workdir else _workdir(options.config)
    console = Console(stderr=True)
    if loaded.swapped:
        console.print(loaded.swapped, markup=False, highlight=False, soft_wrap=True)
    outcome = train(
        experiment, workdir, config_text=config.resolved_text(), difference=config.difference, steps=options.steps,
        profile=profile, console=console, about={"config": options.config, "command": options.command_line},
    )  # fmt: skip
    if options.json:
        _print_json(
            {
                "workdir": str(workdir), "step": outcome.step, "steps_done": outcome.steps_done,
                "seconds": outcome.seconds, "checkpoint": str(outcome.checkpoint), "train": outcome.metrics,
                "valid": outcome.evaluation,
            }
        )  # fmt: skip
    else:
        print(f"{workdir} is at step {outcome.step} ({outcome.steps_done} steps in {outcome.seconds:.0f} s)")


def _keep_programs(folder: Path) -> None:
    """Lets JAX keep compiled programs on disk; it would only warn about a folder that it cannot use."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"cannot write to {folder} ({error.strerror}): choose a folder that you may write with --compile-cache"
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(folder))


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal()):
        raise UserError(f"--profile is {text!r}, but needs the first and the last step to trace: write --profile 10:12")
    return int(first), int(last)


def eval_command(options: argparse.Namespace) -> None:
    """`lra eval`: one report, and what stands beside it."""
    scoring.check(options)
    scorer, *others = (_scorer(options, name) for name in (None, *options.group))
    report, breakdown = scoring.score([scorer, *others], options)
    run, experiment, corpus = scorer.run, scorer.experiment, scorer.experiment.corpus
    reference = {}
    if corpus.vocabulary.complete and report.bytes <= REFERENCE_BYTES and corpus.scored(options.split) is None:
        reference = compressed(b"".join(corpus.text(options.split))[: report.bytes])
    values = report.as_dict() | {"protocol_name": scorer.protocol_name, "reference_bits_per_byte": reference}
    values |= {"seed": experiment.seed}
    values["parameters"] = sum(parameters.count(experiment.abstract_state.parameters).values())
    if options.by != ByContext.name:  # its report is of windows that no protocol of the run has
        evaluations.keep(run, values)
    if options.json:
        _print_json(values if breakdown is None else values | {"by": {breakdown.name: breakdown.as_dict()}})
    else:
        console = Console()
        console.print(report.table())
        if reference:
            by_tool = ", ".join(f"{tool} {bits:.4f}" for tool, bits in reference.items())
            console.print(f"for reference, bits per byte of the same bytes: {by_tool}", highlight=False, soft_wrap=True)
        if breakdown is not None:
            console.print(breakdown.table())
    if breakdown is not None and options.png:
        at = f"{run} at step {report.step} ({options.weights} weights)"
        scored = f"{corpus.name} {options.split}, {report.tokens_scored:,} of {report.tokens_expected:,} tokens"
        breakdown.png(Path(options.png), f"{at}; {scored}; {report.protocol}")
        print(f"drawing written to {options.png}", file=sys.stderr)


def _scorer(options: argparse.Namespace, other: str | None = None) -> Scorer:
    """The run that the options name, or another one as they say."""
    if other is not None:
        options = argparse.Namespace(**vars(options) | {"config": other, "workdir": None})
    run = _find_run(options)
    experiment, _ = _build(options, run=run)
    name = options.protocol or next(iter(experiment.protocols))
    if name not in experiment.protocols:
        raise UserError(f"there is no protocol {name!r} in this run: there are {', '.join(experiment.protocols)}")
    model, step, data = load_model(experiment, run, options.weights, checkpoint=options.checkpoint)
    check_corpus(experiment.corpus, data, run)
    return Scorer(run, experiment, name, model, step)


def generate_command(options: argparse.Namespace) -> None:
    """`lra generate`: continues a text."""
    experiment, _ = _build(options, run=_find_run(options))
    model, step, _ = load_model(experiment, _find_run(options), checkpoint=options.checkpoint)
    vocabulary = experiment.corpus.vocabulary
    prompt = os.fsencode(options.prompt)  # the bytes that were typed, whether or not they are valid text
    ids = generate(
        model, vocabulary.encode(prompt), tokens=options.tokens, context=experiment.data.segment,
        temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, seed=options.seed,
        start=vocabulary.start,
    )  # fmt: skip
    if options.json:
        text = vocabulary.decode(np.asarray(list(ids), np.int64)).decode("utf-8", "replace")
        _print_json({"prompt": prompt.decode("utf-8", "replace"), "text": text, "step": step, "seed": options.seed})
        return
    out = sys.stdout.buffer
    out.write(prompt)
    out.flush()
    for token in ids:
        out.write(vocabulary.decode(np.asarray([token])))
        out.flush()
    out.write(b"\n")


def config_command(options: argparse.Namespace) -> None:
    """`lra config`: the resolved configuration, or what differs in another one."""
    if options.diff is not None:
        changed = config.changes(
            _resolved_text(options), _resolved_text(argparse.Namespace(config=options.diff, set=[]))
        )
        if options.json:
            _print_json({key: {"this": old, "other": new} for key, (old, new) in changed.items()})
        else:
            print("".join(f"{line}\n" for line in config.lines(changed)), end="")
        return
    _, loaded = _build(options)
    if options.json:
        _print_json(config.resolved())
        return
    if loaded.swapped:
        print(f"# {loaded.swapped}")
    print(config.resolved_text(), end="")


def _resolved_text(options: argparse.Namespace) -> str:
    """The resolved configuration; of a run, if nothing is overridden, as it was when the run began."""
    path = config.find(options.config)
    if path.parent == Path(options.config) and not options.set and not getattr(options, "attention", None):
        return path.read_text(encoding="utf-8", errors="replace")  # what is no text is named with its line
    _build(options)
    return config.resolved_text()


def runs_command(options: argparse.Namespace) -> None:
    """`lra runs`: the runs in a folder."""
    root = Path(options.folder)
    if not root.is_dir():
        raise UserError(f"there is no folder {root}: name one that holds runs, or train one with `lra train`")
    found = summaries(root)
    if options.json:
        _print_json([dataclasses.asdict(run) for run in found])
        return
    table = Table("run", "config", "step", "best", "last", "status", caption="best and last: bits per byte on valid")
    for run in found:
        steps = f"{run.step:,}" + (f" of {run.steps:,}" if run.steps else "")
        scores = ("" if score is None else f"{score:.4f}" for score in (run.best, run.last))
        table.add_row(run.run, run.config or "", steps, *scores, run.status)
    Console().print(table)


def params_command(options: argparse.Namespace) -> None:
    """`lra params`: parameters by module."""
    experiment, _ = _build(options)
    counts = parameters.count(experiment.abstract_state.parameters)
    total = sum(counts.values())
    if options.json:
        _print_json({"total": total, "modules": counts})
        return
    table = Table("module", "parameters", title=f"{options.config}: {total:,} parameters", title_justify="left")
    for name, number in counts.items():
        table.add_row(name, f"{number:,}")
    Console().print(table)


def cost_command(options: argparse.Namespace) -> None:
    """`lra cost`: operations and bytes."""
    experiment, _ = _build(options)
    state = experiment.abstract_state
    length = experiment.data.segment if options.length is None else options.length
    batch = experiment.data.batch_size
    try:
        counted = cost(experiment.model(state), length=length, batch=batch, optimizer=state.optimizer)
    except ValueError as error:  # what a pattern can say only when it knows the length, or needs the text for
        raise UserError(str(error)) from error
    if options.json:
        _print_json(counted.as_dict())
        return
    for table in counted.tables(options.config):
        Console().print(table)


def list_command(options: argparse.Namespace) -> None:
    """`lra attention list`: the patterns with their promises."""
    rows = []
    promised = [field.name for field in dataclasses.fields(Promise)]
    for name, cls in PATTERNS.items():
        promise = _promise(cls, True) or _promise(cls, False) or Promise()
        about = (sys.modules[cls.__module__].__doc__ or "").strip().splitlines()[0]
        rows.append({"name": name, "class": cls.__name__, "about": about} | vars(promise))
    if options.json:
        _print_json(rows)
        return
    table = Table("pattern", "promises", show_lines=True)
    for row in rows:
        held = {name: row[name] for name in promised if row[name]}
        kept = [name if value is True else f"{name} ({value})" for name, value in held.items()]
        table.add_row(row["name"], f"{row['about']}\n{', '.join(kept)}")
    Console().print(table)


def show_command(options: argparse.Namespace) -> None:
    """`lra attention show`: who reads whom."""
    show.check(options)
    if options.name in PATTERNS:
        subject = show.example(options)
    elif Path(options.name).exists() or options.name in config.names():
        options.config = options.name
        experiment, _ = _build(options)
        subject = show.layers(experiment.model(experiment.abstract_state).stack, options)
    else:
        known = [*PATTERNS, *config.names()]
        near = difflib.get_close_matches(options.name, known, n=3)
        raise UserError(f"there is no pattern or configuration {options.name!r}: {_suggest(near, known)}")
    drawings = subject.drawings(options)
    if options.json:
        _print_json(subject.as_dict(drawings, options.length))
    else:
        print(draw.text(drawings, subject.title))
    if options.png:
        draw.png(drawings, Path(options.png), subject.title)
        print(f"drawing written to {options.png}", file=sys.stderr)


def spans_command(options: argparse.Namespace) -> None:
    """`lra attention spans`: how far the heads of a run read."""
    run = _find_run(options)
    experiment, _ = _build(options, run=run)
    model, step, _ = load_model(experiment, run, checkpoint=options.checkpoint)
    found, title = spans.learned(model.stack, str(run)), f"{run} at step {step:,}"
    if options.json:
        _print_json({"step": step, "layers": [dataclasses.asdict(each) for each in found]})
    else:
        Console().print(spans.table(found, title))
    if options.png:
        spans.png(found, Path(options.png), title)
        print(f"drawing written to {options.png}", file=sys.stderr)


def bench_command(options: argparse.Namespace) -> None:
    """`lra bench`: time and temporary memory of patterns against a baseline."""
    for name, least in (("length", 1), ("heads", 1), ("head_dim", 1), ("batch", 1), ("repeat", 2)):
        for value in np.atleast_1d(getattr(options, name)).tolist():
            if value < least:
                raise UserError(f"--{name.replace('_', '-')} is {value}, but needs to be at least {least}: raise it")
    setting = bench.Setting(options.heads, options.head_dim, options.batch, not options.bidirectional, options.repeat)
    baseline = bench.candidate(options.against, setting)
    baseline.build(setting)
    candidates, skipped = [], []
    for text in options.patterns or PATTERNS:
        candidate = bench.candidate(text, setting)
        try:
            candidate.build(setting)
        except UserError as error:
            if options.patterns:
                raise
            skipped.append(str(error))  # not every pattern has a form for every setting
        else:
            candidates.append(candidate)
    console = Console(stderr=True)
    lengths = track(options.length, "measuring", console=console, transient=True, disable=not console.is_terminal)
    rows = [row for length in lengths for row in bench.compare(candidates, baseline, length, setting)]
    about = dataclasses.asdict(setting) | {
        "dtype": "float32", "against": baseline.name, "jax": jax.__version__,
        "device": jax.devices()[0].device_kind, "machine": platform.machine(),
    }  # fmt: skip
    if options.json:
        _print_json(about | {"skipped": skipped, "rows": rows})
        return
    shown = ", ".join(f"{name} {value}" for name, value in about.items())
    Console().print(bench.table(rows, f"median ± interquartile range; {shown}"))
    for reason in skipped:
        print(f"skipped {reason}", file=sys.stderr)


def _build(options: argparse.Namespace, run: Path | None = None) -> tuple[Experiment, config.Loaded]:
    """The experiment of a configuration or run, everything checked."""
    overrides = list(options.set)
    if run is None and getattr(options, "seed", None) is not None:
        overrides.append(f"Experiment.seed = {options.seed}")
    named = options.config if run is None else run / "config.gin"  # a run may be called as a shipped configuration is
    loaded = config.load(named, overrides=overrides, attention=getattr(options, "attention", None))
    return config.build(loaded), loaded


def _workdir(name: str) -> Path:
    """The folder of a configuration's run: by a shipped name, by a file's stem, or the run folder itself."""
    path = Path(name)
    if name not in config.names() and (path / "config.gin").is_file():
        return path
    return RUNS / (path.stem if path.suffix == ".gin" else name)


def _find_run(options: argparse.Namespace) -> Path:
    """The run folder that RUN_OR_CONFIG names."""
    workdir = getattr(options, "workdir", None)
    tried = [Path(workdir)] if workdir else list(dict.fromkeys([_workdir(options.config), Path(options.config)]))
    for path in tried:
        if (path / "config.gin").is_file():
            return path
    known = sorted(path.parent.as_posix() for path in RUNS.rglob("config.gin")) if RUNS.is_dir() else []
    near = difflib.get_close_matches(tried[0].as_posix(), known, n=3)
    raise UserError(
        f"there is no run {' or '.join(str(path) for path in tried)}: "
        + (_suggest(near, known) if known else f"there are no runs under {RUNS}/ yet, train one with `lra train`")
    )


def _suggest(near: list[str], known: list[str]) -> str:
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"


def _promise(cls: type[Any], causal: bool) -> Promise | None:
    arguments = cls.examples()[0]
    try:
        return cls(**arguments, site=Site(num_heads=EXAMPLE_HEADS, causal=causal), rngs=nnx.Rngs(0)).promise
    except ValueError:
        return None


def _print_json(value: Any) -> None:
    print(json.dumps(value, allow_nan=False))


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "train": train_command,
    "eval": eval_command,
    "generate": generate_command,
    "config": config_command,
    "params": params_command,
    "cost": cost_command,
    "runs": runs_command,
    "attention list": list_command,
    "attention show": show_command,
    "attention spans": spans_command,
    "bench": bench_command,
    **data_commands.COMMANDS,
    **tables.COMMANDS,
}
