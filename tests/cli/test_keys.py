"""`sluice keys`."""

import json
import re
import stat
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sluice.cli.app import app
from sluice.cli.errors import CliError
from sluice.cli.terminal.view import console
from sluice.gateway.key_file import key_digest, read_key_file


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLUICE_SERVE_KEYS", raising=False)
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["keys", *arguments])
    if isinstance(result.exception, CliError):
        raise result.exception
    return result


def create(*arguments: str) -> str:
    result = run("create", "--tenant", "acme", "--file", "keys.json", *arguments)
    assert result.exit_code == 0, result.output
    (secret,) = result.stdout.splitlines()
    return secret


def test_a_created_key_is_printed_once_and_its_hash_is_in_the_file() -> None:
    batches = ("--batch-bytes", "1000000", "--batch-runs", "3")
    limits = ("--requests-per-minute", "60", "--lanes", "batch", "--models", "a,b", *batches)
    secret = create(*limits, "--note", "the phone app")
    (key,) = read_key_file(Path("keys.json")).keys
    assert (key.batch_bytes, key.batch_runs) == (1_000_000, 3)
    assert (key.tenant, key.sha256, key.requests_per_minute) == ("acme", key_digest(secret), 60)
    assert (key.tokens_per_minute, key.lanes, key.models, key.note) == (None, ("batch",), ("a", "b"), "the phone app")
    assert stat.S_IMODE(Path("keys.json").stat().st_mode) == 0o600
    listed = json.loads(run("list", "--file", "keys.json", "--json").stdout)
    assert listed["id"] == key.id
    assert secret not in str(listed)
    assert key.sha256 not in str(listed)


def test_the_list_fits_80_columns_without_breaking_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.cli.terminal.output.console", lambda width: console(width=80))
    create("--requests-per-minute", "60", "--tokens-per-minute", "1000000", "--expires", "2099-01-31T10:00:00+02:00")
    create("--lanes", "batch", "--models", "tiny,large", "--note", "the phone app")
    listed = run("list", "--file", "keys.json").stdout
    assert max(map(len, listed.splitlines())) <= 80
    for word in ("acme", "60", "requests,", "1,000,000", "tokens", "2099-01-31", "08:00", "batch;", "tiny,", "phone"):
        assert word in listed.split(), listed


def test_a_revoked_key_is_gone_and_the_others_stay() -> None:
    create()
    first = read_key_file(Path("keys.json")).keys[0]
    create()
    run("revoke", first.id, "--file", "keys.json")
    assert [key.id == first.id for key in read_key_file(Path("keys.json")).keys] == [False]


def test_the_file_is_that_of_the_gateway_s_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(".env").write_text("SLUICE_SERVE_KEYS=from-env-file.json\n")
    run("create", "--tenant", "a")
    monkeypatch.setenv("SLUICE_SERVE_KEYS", "from-environment.json")
    run("create", "--tenant", "b")
    files = (Path("from-env-file.json"), Path("from-environment.json"))
    assert [key.tenant for file in files for key in read_key_file(file).keys] == ["a", "b"]


@pytest.mark.parametrize("when", ["90d", "2099-01-31", "2099-01-31T10:00:00+02:00"])
def test_a_key_expires_at_a_time_in_a_zone(when: str) -> None:
    create("--expires", when)
    (key,) = read_key_file(Path("keys.json")).keys
    assert key.expires is not None
    assert key.expires.tzinfo is not None


def test_the_list_marks_the_keys_that_have_expired() -> None:
    create("--expires", "2099-01-31")
    content = Path("keys.json").read_text()
    Path("keys.json").write_text(content.replace("2099", "2020"))
    create("--expires", "2099-01-31")
    listed = run("list", "--file", "keys.json").stdout.splitlines()
    assert [line.count("expired") for line in listed if "2020-" in line or "2099-" in line] == [1, 0]
    entries = run("list", "--file", "keys.json", "--json").stdout.splitlines()
    assert [json.loads(entry)["expired"] for entry in entries] == [True, False]


@pytest.mark.parametrize("when", ["2020-01-01", "2020-01-01T00:00:00+02:00", "0m"])
def test_a_key_that_would_expire_in_the_past_is_not_created(when: str) -> None:
    with pytest.raises(CliError, match="--expires: .* is in the past"):
        create("--expires", when)
    assert not Path("keys.json").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["revoke", "k-9", "--file", "keys.json"], "there is no key 'k-9' in keys.json; "),
        (["list"], "--file: the file of the keys is not given; "),
        (["list", "--file", "nowhere.json"], "nowhere.json: it cannot be read: No such file"),
        (["create", "--tenant", "", "--file", "keys.json"], "tenant: "),
        (["create", "--tenant", "a", "--expires", "soon", "--file", "keys.json"], "--expires: 'soon' is not a time; "),
        (["create", "--tenant", "a", "--file", "nowhere/keys.json"], "nowhere/keys.json: it cannot be written: "),
        (["create", "--tenant", "a", "--file", "broken.json"], "broken.json: Invalid JSON"),
    ],
)
def test_what_cannot_be_done_is_told_in_a_sentence(arguments: list[str], sentence: str) -> None:
    Path("broken.json").write_text("{")
    with pytest.raises(CliError) as refused:
        run(*arguments)
    assert str(refused.value).startswith(sentence)
    assert Path("broken.json").read_text() == "{"


@pytest.mark.parametrize("command", [["list"], ["revoke", "k-1"], ["create", "--tenant", "a"]])
def test_without_the_extra_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sluice.gateway.key_file", None)
    with pytest.raises(CliError, match=re.escape("run ./scripts/setup worker,server")):
        run(*command, "--file", "keys.json")
