"""`sluice prefix` on a folder, without a worker."""

import base64
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sluice.cli.app import app
from sluice.cli.errors import CliError
from sluice.cli.terminal.view import console
from tests.prefix_store.segments import files, read, segment, store, written
from worker.chat.warm import Warmed
from worker.cli.prefix import _warmed
from worker.outcomes import NotStored, StoreResult
from worker.prefix_store.folder import Folder
from worker.prefix_store.listing import Listing
from worker.prefix_store.names import IMAGE_FEATURES, model_digest, model_record
from worker.prefix_store.records import HeldNode
from worker.prefix_store.store import PrefixStore, StoreOptions
from worker.prefix_store.writer import NewSegment

PATH = tuple(range(30))


def run(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run a command that succeeds; return the JSON lines of stdout."""
    result = CliRunner().invoke(app, ["prefix", *arguments, "--dir", str(folder)])
    assert result.exit_code == 0, result.exception
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def refused(folder: Path, *arguments: str, exit_code: int = 2) -> str:
    """Run a command that fails; return the message."""
    result = CliRunner().invoke(app, ["prefix", *arguments, "--dir", str(folder)])
    assert isinstance(result.exception, CliError)
    assert result.exception.exit_code == exit_code
    return str(result.exception)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two prefixes that share their first file, and one of a tenant."""
    shared = segment(PATH[:10])
    written(
        tmp_path, shared, segment(PATH, 10, state=True), segment((*PATH[:10], 99), 10), segment((7,), namespace="acme")
    )
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


def test_files_that_cannot_be_removed_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Folder, "remove", lambda self, name: False)  # as root may remove anything
    told = refused(folder, "drop", id_of(folder, 30), exit_code=1)
    assert "1 file could not be removed" in told
    assert any(file.name in told for file in files(folder))


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


# Prefixes that continue each other: `a` of 10 tokens, and `b` of 30


@pytest.fixture
def continued(tmp_path: Path) -> Path:
    """`a` and `b`, both pinned one after the other."""
    first, second = segment(PATH[:10]), segment(PATH, 10)
    pinned(tmp_path, first)
    pinned(tmp_path, first, second)
    return tmp_path


def pinned(folder: Path, *segments: NewSegment) -> None:
    """Write and pin a prefix, as `warm` does."""
    opened = store(folder)
    for each in segments:
        assert opened.writer.write(replace(each, pinned=True, ends_pinned=each is segments[-1]))
    opened.close(20)


def listed_pins(folder: Path) -> dict[int, bool]:
    """Return which prefixes are pinned, by their tokens."""
    return {each["tokens"]: each["pinned"] for each in run(folder, "list", "--json")}


def said(folder: Path, *arguments: str) -> str:
    """Run a command that succeeds; return what it says."""
    result = CliRunner().invoke(app, ["prefix", *arguments, "--dir", str(folder)])
    assert result.exit_code == 0, result.exception
    return result.stderr


def fill(folder: Path) -> None:
    """Remove what may be removed for space."""
    store(folder, max_bytes=1).close(5)


def test_a_pinned_prefix_that_another_one_continues_is_listed(continued: Path) -> None:
    assert listed_pins(continued) == {10: True, 30: True}


def test_a_dropped_prefix_leaves_the_pinned_one_that_it_continues(continued: Path) -> None:
    assert "kept 1 file that other prefixes share, 1 of them pinned" in said(continued, "drop", id_of(continued, 30))
    fill(continued)
    assert listed_pins(continued) == {10: True}


def test_a_dropped_prefix_leaves_its_files_to_the_one_that_continues_it(continued: Path) -> None:
    assert "0 files; kept 1 file" in said(continued, "drop", id_of(continued, 10))
    assert listed_pins(continued) == {30: True}
    run(continued, "drop", id_of(continued, 30))
    assert files(continued) == []


@pytest.mark.parametrize(("unpinned", "left"), [(10, {30: True}), (30, {10: True})])
def test_unpinning_a_prefix_leaves_the_pin_of_the_other(continued: Path, unpinned: int, left: dict[int, bool]) -> None:
    run(continued, "unpin", id_of(continued, unpinned))
    assert listed_pins(continued) == {30: False} | left
    fill(continued)
    assert listed_pins(continued) == left


def test_a_prefix_that_is_not_pinned_cannot_be_unpinned(tmp_path: Path) -> None:
    pinned(tmp_path, segment(PATH[:10]))
    written(tmp_path, segment(PATH, 10))
    assert "not pinned" in refused(tmp_path, "unpin", id_of(tmp_path, 30), exit_code=1)
    fill(tmp_path)
    assert listed_pins(tmp_path) == {10: True}


def test_a_prefix_that_is_pinned_by_id_stays_when_one_that_continues_it_is_dropped(tmp_path: Path) -> None:
    written(tmp_path, segment(PATH[:10]))
    run(tmp_path, "pin", id_of(tmp_path, 10))
    written(tmp_path, segment(PATH, 10))
    run(tmp_path, "drop", id_of(tmp_path, 30))
    assert listed_pins(tmp_path) == {10: True}


def test_a_pinned_end_stays_one_when_it_is_written_again_with_its_state(continued: Path) -> None:
    written(continued, segment(PATH[:10], state=True))
    assert listed_pins(continued) == {10: True, 30: True}


def test_files_before_a_pinned_one_are_not_removed_for_space(continued: Path) -> None:
    for pin in continued.glob("*-0-10-*.pin"):
        pin.unlink()
    fill(continued)
    assert [each["complete"] for each in run(continued, "list", "--json")] == [True]


def test_pins_of_earlier_versions_are_those_of_the_longest_prefix(continued: Path) -> None:
    for pin in continued.glob("*.pin"):
        pin.write_bytes(b"")
    assert listed_pins(continued) == {30: True}
    run(continued, "unpin", id_of(continued, 30))
    fill(continued)
    assert files(continued) == []


@pytest.mark.parametrize("command", ["pin", "unpin", "drop"])
def test_an_empty_id_is_refused(tmp_path: Path, command: str) -> None:
    pinned(tmp_path, segment(PATH))
    assert "empty" in refused(tmp_path, command, "")
    assert listed_pins(tmp_path) == {30: True}


def test_the_last_use_of_a_prefix_is_that_of_its_own_last_file(folder: Path) -> None:
    own = {each.tokens: each.files[-1] for each in Listing(folder).prefixes}
    os.utime(folder / str(own[30]), (1e9, 1e9))
    newest = [each["tokens"] for each in run(folder, "list", "--json")]
    assert newest[-1] == 30


# Hits, age and memory

HELD = (5_000_000, (HeldNode(None, "", PATH[:10], 1_000_000, 4), HeldNode(0, "", PATH[10:], 2_000_000, 1)))


def test_hits_age_and_memory_are_listed(folder: Path) -> None:
    opened = store(folder)
    for _ in range(2):
        read(opened, opened.find("", PATH, stateful=False))
    opened.memory.show(*HELD)
    opened.writer.scan()
    listed = {each["tokens"]: each for each in run(folder, "list", "--json")}
    opened.close(20)
    found = {tokens: (each["hits"], each["memory_bytes"], each["memory_uses"]) for tokens, each in listed.items()}
    assert found == {1: (0, 0, 0), 11: (2, 1_000_000, 4), 30: (2, 3_000_000, 4)}
    assert all(0 <= each["age_s"] < 60 for each in listed.values())
    assert {each["memory_bytes"] for each in run(folder, "list", "--json")} == {0}  # no worker runs


def test_features_of_images_are_told_from_prefixes(tmp_path: Path) -> None:
    image = (IMAGE_FEATURES + 7,) * 12
    written(tmp_path, segment((1, 2, 3)), segment(image))
    listed = {each["tokens"]: each["kind"] for each in run(tmp_path, "list", "--json")}
    assert listed == {3: "prefix", 12: "image"}
    (file,) = [each for each in files(tmp_path) if "-0-12-" in each.name]
    file.write_bytes(b"damaged")
    listed = {each["tokens"]: each["kind"] for each in run(tmp_path, "list", "--json")}
    assert listed == {3: "prefix", 12: None}


def test_the_table_keeps_ids_and_numbers_whole_in_80_columns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.cli.terminal.output.console", lambda width: console(width=80))
    for tokens in (1, 11, 30):
        run(folder, "pin", id_of(folder, tokens))
    opened = store(folder)
    opened.memory.show(HELD[0], tuple(replace(each, nbytes=6_000_000_000) for each in HELD[1]))
    opened.writer.scan()
    result = CliRunner().invoke(app, ["prefix", "list", "--dir", str(folder)])
    opened.close(20)
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert all(any(each["id"] in line for line in lines) for each in run(folder, "list", "--json"))
    assert {"12,000", "6,000"} <= set(result.stdout.split())
    assert {"tenant", "disk", "RAM", "hits", "age", "used", "notes"} <= set(result.stdout.split())


def test_the_age_of_a_file_that_cannot_be_read_is_unknown(folder: Path) -> None:
    for each in Listing(folder).prefixes:
        (folder / str(each.files[-1])).write_bytes(b"")
    assert {each["age_s"] for each in run(folder, "list", "--json")} == {None}


# Encrypted files

KEY, OTHER_KEY = (base64.b64encode(bytes([byte]) * 32).decode() for byte in (1, 2))


def encrypted(folder: Path, namespace: str) -> None:
    written(
        folder, segment(PATH, namespace=namespace), segment((*PATH, 1), 30, namespace=namespace), key=bytes([1]) * 32
    )


@pytest.mark.parametrize("key", [None, OTHER_KEY])
def test_files_that_cannot_be_read_are_reported_when_a_tenant_is_dropped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    encrypted(folder, "acme")
    if key:
        monkeypatch.setenv("SLUICE_PREFIX_DISK_KEY", key)
    plain = len(files(folder)) - 2
    result = CliRunner().invoke(app, ["prefix", "drop", "--tenant", "acme", "--dir", str(folder)])
    assert isinstance(result.exception, CliError)
    assert result.exception.exit_code == 1
    assert "2 files cannot be read" in str(result.exception)
    assert len(files(folder)) == 2 + plain - 1


def test_with_the_key_a_tenant_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encrypted(tmp_path, "acme")
    encrypted(tmp_path, "other")
    monkeypatch.setenv("SLUICE_PREFIX_DISK_KEY", KEY)
    run(tmp_path, "drop", "--tenant", "acme")
    assert [each["tenant"] for each in run(tmp_path, "list", "--json")] == ["other"]


def test_files_of_other_versions_are_reported_when_a_tenant_is_dropped(folder: Path) -> None:
    (folder / "sluice-prefix-v0-something.safetensors").write_bytes(b"acme")
    assert "1 file cannot be read" in refused(folder, "drop", "--tenant", "acme", exit_code=1)
    assert "acme" not in [each["tenant"] for each in run(folder, "list", "--json")]


def test_a_superseded_file_of_a_tenant_is_dropped_too(tmp_path: Path) -> None:
    written(tmp_path / "kv", segment(PATH, namespace="acme"))
    written(tmp_path, segment(PATH, namespace="acme", state=True), segment((*PATH, 1), 30, namespace="acme"))
    for file in files(tmp_path / "kv"):  # its writer has died before it could remove the file
        file.rename(tmp_path / file.name)
    run(tmp_path, "drop", "--tenant", "acme")
    assert files(tmp_path) == []


# Settings


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, without settings in the environment."""
    for name in ("SLUICE_PREFIX_DISK_DIR", "SLUICE_PREFIX_DISK_KEY"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def listed() -> list[dict[str, Any]]:
    """List the prefixes of the folder in the settings."""
    result = CliRunner().invoke(app, ["prefix", "list", "--json"])
    assert result.exit_code == 0, result.exception
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_folder_and_key_are_read_from_the_file_of_settings(tmp_path: Path, elsewhere: Path) -> None:
    encrypted(tmp_path / "prefixes", "acme")
    lines = [f'export SLUICE_PREFIX_DISK_DIR="{tmp_path / "prefixes"}"  # a remark', f"sluice_prefix_disk_key={KEY}"]
    (elsewhere / ".env").write_text("\n".join([*lines, "SLUICE_MODEL=", "SLUICE_MAX_ROWS=many", ""]))
    assert [(each["tenant"], each["tokens"]) for each in listed()] == [("acme", 31)]


def test_the_environment_overrides_the_file_of_settings(
    folder: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (elsewhere / ".env").write_text(f"SLUICE_PREFIX_DISK_DIR={elsewhere}\n")
    assert listed() == []
    monkeypatch.setenv("SLUICE_PREFIX_DISK_DIR", str(folder))
    assert len(listed()) == 3


def test_without_a_folder_in_the_settings_one_is_asked_for(elsewhere: Path) -> None:
    result = CliRunner().invoke(app, ["prefix", "list"])
    assert isinstance(result.exception, CliError)
    assert "--dir" in str(result.exception)


def test_a_bad_key_in_the_file_of_settings_is_refused_without_being_shown(folder: Path, elsewhere: Path) -> None:
    (elsewhere / ".env").write_text(f"SLUICE_PREFIX_DISK_DIR={folder}\nSLUICE_PREFIX_DISK_KEY=kumquat\n")
    result = CliRunner().invoke(app, ["prefix", "list"])
    assert isinstance(result.exception, CliError)
    assert "SLUICE_PREFIX_DISK_KEY" in str(result.exception)
    assert "kumquat" not in str(result.exception)


# Outdated prefixes


def used_by(folder: Path, fingerprint: str, used_s: float) -> None:
    """Write and pin a prefix as a worker with this release of a model does, which was last used at this time."""
    opened = PrefixStore(StoreOptions(folder, 10_000_000, label="models/a"), fingerprint)
    opened.open()
    opened.writer.write(replace(segment(PATH), pinned=True))
    opened.close(20)
    os.utime(folder / model_record(model_digest(fingerprint)), (used_s, used_s))


def test_outdated_prefixes_are_marked_and_dropped_although_they_are_pinned(folder: Path) -> None:
    used_by(folder, "old weights", 1e9)
    used_by(folder, "new weights", 2e9)
    (folder / "sluice-prefix-v0-something.safetensors").write_bytes(b"x")
    store(folder, max_bytes=1).close(5)  # pinned ones stay, outdated or not
    marked = {each["model_digest"]: each["outdated"] for each in run(folder, "list", "--json")}
    old, new = (model_digest(f"{age} weights")[:12] for age in ("old", "new"))
    assert marked == {old: True, new: False}
    run(folder, "drop", "--outdated")
    assert [(each["model"], each["model_digest"]) for each in run(folder, "list", "--json")] == [("models/a", new)]
    assert "Prefixes of model models/a" in CliRunner().invoke(app, ["prefix", "list", "--dir", str(folder)]).stdout
    assert not [*folder.glob("sluice-prefix-v0*")]


def test_prefixes_of_models_without_a_record_are_not_outdated(folder: Path) -> None:
    run(folder, "drop", "--outdated")
    assert len(run(folder, "list", "--json")) == 3
    assert not any(each["outdated"] for each in run(folder, "list", "--json"))


def test_one_kind_of_prefixes_is_dropped_at_a_time(folder: Path) -> None:
    assert "either" in refused(folder, "drop", "--outdated", "--tenant", "acme")
    assert "empty" in refused(folder, "drop", "--tenant", "")


# What `warm` says

WHOLE, REFUSED = StoreResult(200, 3_000_000), StoreResult(0, missing=NotStored.DAILY_LIMIT)
PARTLY = StoreResult(120, 1_000_000, NotStored.QUOTA)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (Warmed(1, 200, 0, WHOLE), ["200 tokens are on disk", "3.0 MB are new"]),
        (Warmed(1, 200, 200, StoreResult(200)), ["200 tokens are on disk", "nothing is new", "200 were found on disk"]),
        (Warmed(1, 200, 0, PARTLY), ["120 tokens are on disk", "of 200", "SLUICE_PREFIX_DISK_GB"]),
        (Warmed(1, 200, 0, REFUSED), ["nothing is written", "SLUICE_PREFIX_DISK_DAILY_GB"]),
        (Warmed(1, problem="too long"), ["nothing is written", "too long"]),
    ],
)
def test_warm_says_what_of_a_conversation_is_on_disk(result: Warmed, said: list[str]) -> None:
    assert all(each in _warmed(result) for each in said)
    assert bool(result.missing) == (result.stored not in (WHOLE, StoreResult(200)))
