"""The wheel holds all of lra and nothing else, and works away from the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def names(wheel: Path) -> set[str]:
    """Files of the wheel apart from its metadata."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_wheel_holds_every_file_of_the_package(wheel: Path):
    files = {path for path in (ROOT / "lra").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert names(wheel) == {path.relative_to(ROOT).as_posix() for path in files if not path.name.startswith(".")}
    assert {"lra/__init__.py", "lra/py.typed"} <= names(wheel)
    assert any(name.startswith("lra/configs/") and name.endswith(".gin") for name in names(wheel))


def test_links_at_the_top_are_not_packages(wheel: Path):
    links = {path.name for path in ROOT.iterdir() if path.is_symlink()}
    assert links == {"attention", "configs", "data", "models"}
    assert {name.split("/")[0] for name in names(wheel)} == {"lra"}


def test_wheel_declares_command_and_python(wheel: Path):
    archive = zipfile.ZipFile(wheel)
    text = {name.rsplit("/")[-1]: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    assert "lra = lra.cli:main" in text["entry_points.txt"]
    assert "Requires-Python: >=3.11" in text["METADATA"]
    assert text["top_level.txt"].split() == ["lra"]


@pytest.mark.slow
def test_installed_wheel_trains_from_another_folder(wheel: Path, tmp_path: Path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run(pip, check=True, capture_output=True)
    environment = os.environ | {"PYTHONPATH": str(site)}

    def python(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    assert Path(python("-c", "import lra; print(lra.__file__)").strip()).is_relative_to(site)
    python("-m", "lra.cli", "train", "quickstart", "--steps", "2")
    assert (elsewhere / "runs" / "quickstart").is_dir()
