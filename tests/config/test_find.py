from importlib import resources
from pathlib import Path

import pytest

from lra import config
from lra.errors import UserError


def test_names_leave_out_the_parts():
    assert config.names() == ["text/small"]


def test_a_shipped_name(tmp_path):
    assert config.find("text/small") == tmp_path / "configs" / "text" / "small.gin"


def test_a_path_and_a_run_folder(tmp_path):
    mine = tmp_path / "mine.gin"
    mine.write_text("")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.gin").write_text("")
    assert config.find(mine) == mine
    assert config.find(str(run)) == run / "config.gin"


def test_an_unknown_name_gives_the_nearest_one():
    with pytest.raises(UserError, match=r"^there is no configuration or file 'text/smal': did you mean text/small\?$"):
        config.find("text/smal")
    with pytest.raises(UserError, match=r"did you mean text/small\?$"):
        config.find("text/small.gin")


def test_a_name_far_from_all_gives_the_list():
    with pytest.raises(UserError, match=r"'zebra': there are text/small$"):
        config.find("zebra")


def test_a_part_is_no_configuration():
    with pytest.raises(UserError, match="'base'"):
        config.find("base")


def test_a_folder_without_a_configuration(tmp_path):
    with pytest.raises(UserError, match=r"holds no config\.gin"):
        config.find(tmp_path)


def test_the_shipped_configurations_are_package_data(monkeypatch):
    monkeypatch.undo()  # of the toy configurations
    assert Path(str(resources.files("lra") / "configs")) == config.CONFIGS
    assert config.CONFIGS.is_dir()
