"""`sluice prefix` on a folder, without a worker."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sluice.cli.app import app
from sluice.cli.errors import CliError
from tests.prefix_store.places import files, place, store, written
from worker.prefix_store.listing import Listing

PATH = tuple(range(30))


def run(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run a command that succeeds; return the JSON lines of stdout."""
    result = CliRunner().invoke(app, ["prefix", *arguments, "--dir", str(folder)])
    assert result.exit_code == 0, result.exception
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def refused(folder: Path, *arguments: str) -> str:
    """Run a command that fails; return the message."""
    result = CliRunner().invoke(app, ["prefix", *arguments, "--dir", str(folder)])
    assert isinstance(result.exception, CliError)
    return str(result.exception)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two prefixes that share their first file, and one of a tenant."""
    shared = place(PATH[:10])
    written(tmp_path, shared, place(PATH, 10, state=True), place((*PATH[:10], 99), 10), place((7,), namespace="acme"))
    return tmp_path


def test_prefixes_are_listed_with_the_files_that_they_share(folder: Path) -> None:
    listed = run(folder, "list", "--json")
    assert sorted((each["tokens"], each["tenant"]) for each in listed) == [(1, "acme"), (11, None), (30, None)]
    assert all(each["complete"] and not each["pinned"] for each in listed)
    assert {each["tokens"]: each["bytes"] > 15_000 for each in listed} == {1: False, 11: True, 30: True}


def test_an_empty_folder_has_no_prefixes(tmp_path: Path) -> None:
    assert run(tmp_path, "list", "--json") == []


def id_of(folder: Path, tokens: int) -> str:
    (found,) = [each["id"] for each in run(folder, "list", "--json") if each["tokens"] == tokens]
    return str(found)


def test_a_pinned_prefix_outlives_the_others(folder: Path) -> None:
    run(folder, "pin", id_of(folder, 30))
    store(folder, max_bytes=1).close(5)
    assert [each["tokens"] for each in run(folder, "list", "--json")] == [30]
    assert len(files(folder)) == 2
    run(folder, "unpin", id_of(folder, 30))
    store(folder, max_bytes=1).close(5)
    assert files(folder) == []


def test_unpinning_keeps_the_files_of_another_pinned_prefix(folder: Path) -> None:
    run(folder, "pin", id_of(folder, 30))
    run(folder, "pin", id_of(folder, 11))
    run(folder, "unpin", id_of(folder, 11))
    store(folder, max_bytes=1).close(5)
    assert [each["complete"] for each in run(folder, "list", "--json")] == [True]


def test_a_dropped_prefix_leaves_what_others_share(folder: Path) -> None:
    run(folder, "drop", id_of(folder, 30))
    assert sorted(each["tokens"] for each in run(folder, "list", "--json")) == [1, 11]
    assert all(each["complete"] for each in run(folder, "list", "--json"))


def test_all_prefixes_of_a_tenant_are_dropped(folder: Path) -> None:
    run(folder, "drop", "--tenant", "acme")
    assert sorted(each["tokens"] for each in run(folder, "list", "--json")) == [11, 30]
    assert "SLUICE_PREFIX_CACHE_PER_TENANT" in refused(folder, "drop", "--tenant", "acme")


def test_what_cannot_be_done_is_refused(folder: Path, tmp_path: Path) -> None:
    assert "no such prefix" in refused(folder, "pin", "ffffffffffffff")
    assert "either" in refused(folder, "drop")
    assert "SLUICE_PREFIX_DISK_DIR" in refused(tmp_path / "missing", "list")


def test_a_prefix_without_its_start_is_marked(folder: Path) -> None:
    (first,) = [name for each in Listing(folder).prefixes for name in each.files[:1] if each.tokens == 30]
    (folder / str(first)).unlink()
    assert {each["tokens"]: each["complete"] for each in run(folder, "list", "--json")} == {
        1: True,
        11: False,
        30: False,
    }
