"""Commands of the worker's distribution come to `sluice` by entry points, and without it say what to install."""

import tomllib
from importlib.metadata import entry_points

import pytest
import typer
from typer.testing import CliRunner

from sluice.cli import worker_commands
from sluice.cli.errors import INSTALL, CliError
from tests.support.stack import ROOT


def test_each_entry_point_of_the_project_is_installed_and_is_a_command_or_a_group() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = {each.name: each for each in entry_points(group="sluice.commands")}
    assert {name: each.value for name, each in installed.items()} == project["entry-points"]["sluice.commands"]
    for each in installed.values():
        command = each.load()
        assert isinstance(command, typer.Typer) or callable(command)


@pytest.mark.parametrize("arguments", [[], ["--model", "models/tiny-chat", "-n", "3"]])
def test_a_command_of_a_worker_that_is_not_installed_says_what_to_install(arguments: list[str]) -> None:
    app = typer.Typer()
    app.callback()(lambda: None)
    worker_commands.add(app, "batch.nothing")
    result = CliRunner().invoke(app, ["nothing", *arguments])
    assert isinstance(result.exception, CliError)
    assert str(result.exception) == f"the worker is not installed here: {INSTALL}"
    assert result.exception.exit_code == 2
