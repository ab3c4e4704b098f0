"""The command line: argument parsing, one call a command, and a user's mistake as one sentence with status 2."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from lra import __version__
from lra.errors import Interrupted, UserError, quoted

ANY_CONFIG = "a shipped name, a .gin file or a run folder"
DRAWING = """\
A row is a query, a column a key: ██ is read, · is not. Above 32 keys a line holds two queries: ▀ the upper one reads,
▄ the lower one, █ both. Slots of memory stand left of │, blank while they are empty. Sparsity is the share of the pairs
that are not read."""


BY = """\
what to show beside the score: distance, where attention goes; frequency, by how often a token occurs in train;
position, by place in the segment; context, by tokens of context, on 2048 tokens (or --partial)"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
        0 on success, 2 for a user's mistake, 130 when interrupted by Ctrl-C and 143 by SIGTERM, 1 when nobody reads the
        output; anything else raises.

    Raises:
        SystemExit: after --help and --version, and with status 2 where the arguments cannot be parsed.
    """
    options = _parser().parse_args(argv)
    logging.getLogger("jax._src.debugging").setLevel(logging.CRITICAL)  # would log what is said below, with a traceback
    options.command_line = ["lra", *(sys.argv[1:] if argv is None else argv)]
    try:
        from lra.commands import COMMANDS  # jax and flax are imported only when something is to be done

        COMMANDS[options.command](options)
        sys.stdout.flush()
    except UserError as error:
        print(f"lra: {error}", file=sys.stderr)
        return 2
    except Interrupted as stop:
        print(f"lra: {stop}", file=sys.stderr)
        return 128 + stop.signal
    except RuntimeError as error:
        if (sentence := quoted(error)) is None:
            raise
        print(f"lra: {sentence}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("lra: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # whoever reads, such as `head`, has enough; Python's own flush at exit would complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


class _Parser(argparse.ArgumentParser):
    """Says in one sentence what is wrong with the arguments, as every command does."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"lra: {message} (see `{self.prog} --help`)\n")


def _parser() -> _Parser:
    parser = _Parser(prog="lra", description="Long-range attention: train, evaluate and compare.")
    parser.add_argument("--version", action="version", version=f"lra {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_of_runs, _of_configurations, _of_attention, _of_data, _of_bench):
        add(commands)
    return parser


def _of_runs(commands: argparse._SubParsersAction[_Parser]) -> None:
    """What makes runs, and what is done with them."""
    train = _command(commands, "train", "train a configuration, or resume its run")
    train.add_argument("config", nargs="?", default="quickstart", metavar="CONFIG", help=f"{ANY_CONFIG} (quickstart)")
    train.add_argument("--workdir", help="folder of the run (runs/CONFIG)")
    train.add_argument("--steps", type=int, help="stop after this step; schedule and configuration stay as they are")
    train.add_argument("--seed", type=int, help="of initial values, data order and dropout")
    train.add_argument("--profile", metavar="A:B", help="write a trace of steps A to B for ui.perfetto.dev")
    train.add_argument("--compile-cache", metavar="DIR", help="keep compiled programs there for later calls")
    _attention_option(train)

    evaluate = _command(commands, "eval", "score a run on held-out text")
    _run_arguments(evaluate)
    evaluate.add_argument("--split", default="test", choices=("train", "valid", "test"))
    evaluate.add_argument("--protocol", metavar="NAME", help="of Experiment.protocols (the first one)")
    evaluate.add_argument("--weights", default="last", choices=("last", "ema"), help="ema: their moving average")
    evaluate.add_argument("--partial", type=int, metavar="TOKENS", help="score the first tokens only, and say so")
    evaluate.add_argument("--by", metavar="NAME", help=BY)
    evaluate.add_argument("--group", nargs="+", default=[], metavar="RUN", help="other runs (with --by context)")
    evaluate.add_argument("--contexts", metavar="STEP:LONGEST", help="tokens (with --by context; 8 up to what is read)")
    evaluate.add_argument("--png", metavar="FILE", help="draw it (with --by; needs matplotlib: the extra `plots`)")

    runs = _command(commands, "runs", "list runs with their scores and status", overrides=False)
    runs.add_argument("folder", nargs="?", default="runs", metavar="DIR", help="where to look (runs)")

    generate = _command(commands, "generate", "continue a text")
    _run_arguments(generate)
    generate.add_argument("--prompt", required=True, metavar="TEXT")
    generate.add_argument("--tokens", type=int, default=256, metavar="N", help="tokens to add (256)")
    generate.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0 for the likeliest token (0.8)")
    generate.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    generate.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest tokens of this probability")
    generate.add_argument("--seed", type=int, default=0, help="the same seed gives the same text (0)")


def _of_configurations(commands: argparse._SubParsersAction[_Parser]) -> None:
    resolved = _config_command(commands, "config", "print every parameter with its effective value")
    resolved.add_argument("--diff", metavar="OTHER", help=f"print what differs in another one ({ANY_CONFIG})")
    _config_command(commands, "params", "count parameters")
    cost = _config_command(commands, "cost", "count operations a token and bytes, by part")
    cost.add_argument("--length", type=int, metavar="N", help="tokens of a row (those of a training segment)")


def _of_attention(commands: argparse._SubParsersAction[_Parser]) -> None:
    attention = commands.add_parser("attention", help="list or draw the attention patterns").add_subparsers(
        required=True, metavar="COMMAND"
    )
    _command(attention, "list", "the patterns with what they promise", full_name="attention list", overrides=False)
    show = _command(attention, "show", "draw who reads whom", full_name="attention show", epilog=DRAWING)
    show.add_argument("name", metavar="NAME_OR_CONFIG", help=f"a pattern, or {ANY_CONFIG}")
    show.add_argument("--length", type=int, default=16, metavar="N", help="tokens to draw (16)")
    show.add_argument("--layer", type=int, metavar="I", help="layer of a configuration (0)")
    show.add_argument("--layers", type=int, metavar="M", help="who reaches whom through M layers and their residuals")
    show.add_argument("--segments", type=int, metavar="N", help="N segments of a configuration, as its memory fills")
    show.add_argument("--example", type=int, metavar="I", help="which of a pattern's own examples (0)")
    show.add_argument("--bidirectional", action="store_true", help="the pattern's bidirectional form")
    show.add_argument("--png", metavar="FILE", help="write the drawing (needs matplotlib: the extra `plots`)")

    spans = _command(attention, "spans", "how far the heads of a run have learned to read", full_name="attention spans")
    _run_arguments(spans)
    spans.add_argument("--png", metavar="FILE", help="draw the spans by layer (needs matplotlib: the extra `plots`)")


def _of_data(commands: argparse._SubParsersAction[_Parser]) -> None:
    """Corpora, and the published numbers on them."""
    data = commands.add_parser("data", help="list, describe or prepare the corpora").add_subparsers(
        required=True, metavar="COMMAND"
    )
    _command(data, "list", "the corpora, and which are prepared", full_name="data list", overrides=False)
    info = _command(
        data, "info", "counts, checksums, licence and citation of one", full_name="data info", overrides=False
    )
    prepare = _command(
        data, "prepare", "download or read, check and store one", full_name="data prepare", overrides=False
    )
    for command in (info, prepare):
        command.add_argument("name", metavar="NAME", help="of `lra data list`")
    prepare.add_argument("--source", metavar="PATH", help="file or folder, packed or not; without it, a download")

    table = _command(commands, "table", "published numbers beside this project's runs", overrides=False)
    table.add_argument("name", choices=("enwik8", "text8", "wikitext103", "pg19"), help="the corpus")
    table.add_argument("--runs", default="runs", metavar="DIR", help="where the runs are (runs)")
    table.add_argument("--all", action="store_true", help="ablations, and numbers that papers repeat from others, too")
    table.add_argument("--format", default="terminal", choices=("terminal", "markdown", "csv", "json", "latex"))


def _of_bench(commands: argparse._SubParsersAction[_Parser]) -> None:
    bench = _command(commands, "bench", "measure time and temporary memory of patterns, in turns", overrides=False)
    bench.add_argument(
        "patterns",
        nargs="*",
        metavar="PATTERN",
        help="such as full or 'sliding_window(window=64)'; `jax` is jax.nn.dot_product_attention (every pattern)",
    )
    bench.add_argument("--length", type=int, nargs="+", default=[1024, 4096], metavar="N", help="tokens (1024 4096)")
    bench.add_argument("--against", default="full", metavar="PATTERN", help="what ratios are against (full)")
    bench.add_argument("--heads", type=int, default=8, metavar="H", help="heads (8)")
    bench.add_argument("--head-dim", type=int, default=64, metavar="D", help="width of a head (64)")
    bench.add_argument("--batch", type=int, default=1, metavar="B", help="rows (1)")
    bench.add_argument("--repeat", type=int, default=5, metavar="R", help="turns (5)")
    bench.add_argument("--bidirectional", action="store_true", help="the patterns' bidirectional form")


def _command(
    commands: argparse._SubParsersAction[_Parser],
    name: str,
    about: str,
    full_name: str | None = None,
    overrides: bool = True,
    epilog: str | None = None,
) -> _Parser:
    parser = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".", epilog=epilog)
    parser.set_defaults(command=full_name or name)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else there")
    if overrides:
        parser.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="'NAME.PARAMETER = VALUE'",
            help="override a binding; repeatable",
        )
    return parser


def _config_command(commands: argparse._SubParsersAction[_Parser], name: str, about: str) -> _Parser:
    """A command that describes a configuration."""
    parser = _command(commands, name, about)
    parser.add_argument("config", nargs="?", default="quickstart", metavar="CONFIG", help=f"{ANY_CONFIG} (quickstart)")
    _attention_option(parser)
    return parser


def _run_arguments(parser: _Parser) -> None:
    parser.add_argument(
        "config",
        nargs="?",
        default="quickstart",
        metavar="RUN_OR_CONFIG",
        help="a run folder, or CONFIG for runs/CONFIG",
    )
    parser.add_argument("--workdir", help="folder of the run")
    parser.add_argument(
        "--checkpoint", default="newest", metavar="WHICH", help="newest (default), best (on valid), or a step"
    )


def _attention_option(parser: _Parser) -> None:
    parser.add_argument("--attention", metavar="NAME", help="put this pattern in place of the configuration's")


if __name__ == "__main__":
    sys.exit(main())
