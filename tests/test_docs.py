"""What the documentation shows is run: Python blocks, command lines and docstring examples."""

import doctest
import importlib
import inspect
import pkgutil
import re
import shlex
from pathlib import Path

import pytest

import lra
from lra.cli import main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = [module.name for module in pkgutil.walk_packages(lra.__path__, "lra.")]
SMALL = [
    "LAYERS=1", "WIDTH=8", "HEADS=2", "SEGMENT=16", "BATCH=2", "WARMUP=1", "STEPS=200", "Training.evaluate_tokens=64",
    "Carried.streams=2",
]  # fmt: skip
"""Appended to what the pages show, so that it runs in seconds: sizes only."""


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page):
    names = {"__name__": "page"}
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec"), names)


def test_readme_has_python_and_commands():
    assert blocks(ROOT / "README.md", "python")
    assert len(commands(ROOT / "README.md")) > 8


def commands(page):
    lines = [line.split("  #")[0] for code in blocks(page, "sh") for line in code.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("lra ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run(page, tmp_path, monkeypatch, capsysbinary):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("It is a truth universally acknowledged, that a text is long enough. " * 60)
    sets = [word for value in SMALL for word in ("--set", value)]
    if any("quickstart" in words for words in commands(page)):
        assert main(["train", "quickstart", *sets]) == 0
    for words in commands(page):
        config = [] if "--diff" in words else sets
        extra = {"train": sets, "config": config, "eval": ["--partial", "50"]}.get(words[0], [])
        assert main([*words, *extra]) == 0, (words, capsysbinary.readouterr().err)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_public_functions_have_examples():
    """Every function that `lra.attention` exports has an example that runs."""
    import lra.attention

    finder = doctest.DocTestFinder()
    for name in lra.attention.PATTERNS:
        function = getattr(lra.attention, name)
        if callable(function):  # `heads` is a class alone
            assert any(test.examples for test in finder.find(inspect.unwrap(function), name)), name


def test_make_targets_of_the_readme_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"\bmake ([a-z][a-z-]+)\b(?=[^a-z]|$)", "\n".join(blocks(page, "sh")))) <= targets
