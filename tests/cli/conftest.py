"""A tiny configuration, a run of it, and `lra` in process."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

TINY = """
include "text_file.gin"

LAYERS = 2
WIDTH = 16
HEADS = 2
WINDOW = 5
SEGMENT = 16
BATCH = 2
STEPS = 4
WARMUP = 1
text_file.path = 'book.txt'
Training.log_every = 1
"""
LAYERS = {"python_source/longformer": 4, "python_source/memory_compressed": 5, "python_source/reformer": 2}
"""Layers of configurations that cannot do with one."""
TEXT = "".join(f"{n} green bottles hanging on the wall, and if one falls\n" for n in range(60))


@dataclass(frozen=True)
class Result:
    """What a command left: exit status, stdout, stderr."""

    status: int
    out: str
    err: str


@pytest.fixture(scope="module", autouse=True)
def quick_compilation() -> Iterator[None]:
    """Compiles in a third of the time; these programs run for a few steps only."""
    import jax

    former = jax.config.read("jax_disable_most_optimizations")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # for the processes that tests start
        jax.config.update("jax_disable_most_optimizations", True)
        yield
    jax.config.update("jax_disable_most_optimizations", former)


@pytest.fixture(autouse=True)
def workplace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty current folder but for `tiny.gin` and its text."""
    _equip(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")  # so that no table wraps
    return tmp_path


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Path:
    """A folder with `runs/tiny`, trained without a break; not to be changed."""
    from lra.cli import main

    folder = tmp_path_factory.mktemp("template")
    _equip(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        if main(["train", "tiny.gin"]) != 0:
            raise RuntimeError("the run that the tests share could not be trained")
    return folder


@pytest.fixture
def heads(prepared_heads: Path, workplace: Path) -> None:
    """Small texts prepared as the corpora whose shipped configurations need it, and a vocabulary beside them."""
    (workplace / "dict.txt").symlink_to(prepared_heads / "dict.txt")


@pytest.fixture(scope="session")
def prepared_heads(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Path:
    """The folder of their sources."""
    from lra.data.corpora import Enwik8Head, PG19Head, Text8Head, WikiText103Head

    folder = tmp_path_factory.mktemp("heads")
    texts = {
        Enwik8Head: "<mediawiki x>\n" + TEXT,
        Text8Head: "anarchism originated as a term of abuse " * 40,
        WikiText103Head: " \n = Valkyria Chronicles III = \n \n" + " <unk> green bottles on a wall \n" * 200,
    }
    for corpus, text in texts.items():
        (folder / corpus.name).write_text(text, encoding="utf-8")
        corpus().prepare_from(folder / corpus.name)
    books = folder / PG19Head.name
    for number, split in enumerate(("train", "train", "validation", "test")):
        (books / split).mkdir(parents=True, exist_ok=True)
        (books / split / f"{number}.txt").write_text(TEXT[number:], encoding="utf-8")
    (books / "metadata.csv").write_text("".join(f"{number},Title,1900,URL\n" for number in range(4)), encoding="utf-8")
    PG19Head().prepare_from(books)
    words = ["green", "bottles", *(f"word{number}" for number in range(267_731))]
    (folder / "dict.txt").write_text("".join(f"{word} 3\n" for word in words), encoding="utf-8")
    return folder


@pytest.fixture
def trained(template: Path, workplace: Path) -> Path:
    """`runs/tiny` in the current folder: a trained run, this test's own."""
    shutil.copytree(template / "runs", workplace / "runs")
    return workplace / "runs" / "tiny"


@pytest.fixture
def lra(capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs a command in this process."""
    from lra.cli import main

    def run(*arguments: str) -> Result:
        capfd.readouterr()
        try:
            status = main(arguments)
        except SystemExit as stop:  # how argparse refuses
            status = stop.code
        return Result(status, *capfd.readouterr())

    return run


def _equip(folder: Path) -> None:
    (folder / "tiny.gin").write_text(TINY, encoding="utf-8")
    (folder / "book.txt").write_text(TEXT, encoding="utf-8")
