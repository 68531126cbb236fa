"""The command `scripts/conformance`, without its clients: what it reads, prints and exits with."""

from pathlib import Path

import pytest
from rich.console import Console

from tests.support.conformance import __main__ as command
from tests.support.conformance.catalog import CLIENTS, Client
from tests.support.conformance.environments import CHECKS, NotInstalled, install
from tests.support.conformance.results import Report, failures, read_report, table

PRINTED = ["version\t3.1", "a line of the client's own", "pass\tchat: answer", "fail\tchat: tools\tKeyError: 'id'"]


def test_the_lines_of_the_checks_are_read_and_all_others_are_not() -> None:
    report = read_report("openai", PRINTED)
    assert report == Report("openai", "3.1", {"chat: answer": None, "chat: tools": "KeyError: 'id'"})
    assert not report.passed


@pytest.mark.parametrize(("lines", "problem"), [([], None), (PRINTED[:3], "it ended with 1")])
def test_a_client_passes_only_if_all_of_its_checks_ran(lines: list[str], problem: str | None) -> None:
    assert not read_report("openai", lines, problem).passed
    assert read_report("openai", PRINTED[:3]).passed


def test_the_table_has_a_row_for_each_call_and_a_column_for_each_client() -> None:
    reports = [read_report("openai", PRINTED), Report("other", "2.0", {"models: list": None})]
    console = Console(width=100, record=True)
    console.print(table(reports))
    rows = [line.split() for line in console.export_text().splitlines() if ":" in line]
    assert rows == [
        ["chat:", "answer", "pass", "·"],
        ["chat:", "tools", "FAIL", "·"],
        ["models:", "list", "·", "pass"],
    ]
    assert failures(reports) == ["openai, chat: tools: KeyError: 'id'"]


def test_a_client_that_cannot_be_installed_is_named_and_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotInstalled, match="install Node"):
        install(CLIENTS["ai-sdk"], tmp_path)
    report = Report("absent", "-", {}, "not installed: no such package")
    assert failures([report]) == ["absent: not installed: no such package"]
    assert not report.passed


def test_checks_that_break_or_hang_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client("broken", (), "openai_sdk.py", runs_s=1.0)
    said = "printf 'pass\\tchat: answer\\n'; "
    broken = command.check(client, ["sh", "-c", said + "exit 3"], "http://127.0.0.1:1")
    assert (broken.calls, broken.passed) == ({"chat: answer": None}, False)
    hanging = command.check(client, ["sh", "-c", said + "exec sleep 60"], "http://127.0.0.1:1")
    assert (hanging.calls, hanging.passed) == ({"chat: answer": None}, False)


@pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS)
def test_each_client_has_its_checks(client: Client) -> None:
    assert (CHECKS / client.script).is_file()
