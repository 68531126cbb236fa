"""The file of the keys, and the keys of a running gateway."""

import errno
import json
import os
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from sluice.gateway.key_file import BadKeyFile, Key, KeyFile, KeyStore, edit, key_digest, new_key, read_key_file

ENTRY = {"id": "k-1", "sha256": key_digest("secret"), "tenant": "acme"}


def write(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"keys": entries}))
    return path


def add(key: Key) -> Any:
    return lambda content: content.model_copy(update={"keys": (*content.keys, key)})


def test_a_created_file_is_readable_by_its_owner_only_and_holds_no_secret(tmp_path: Path) -> None:
    secret, key = new_key(tenant="acme")
    edit(tmp_path / "keys.json", add(key))
    assert stat.S_IMODE((tmp_path / "keys.json").stat().st_mode) == 0o600
    assert read_key_file(tmp_path / "keys.json").keys == (key,)
    assert secret not in (tmp_path / "keys.json").read_text()
    assert os.listdir(tmp_path) == ["keys.json"]


def test_two_new_keys_differ_in_secret_and_id() -> None:
    made = [new_key(tenant="acme") for _ in range(2)]
    assert len({secret for secret, _ in made}) == len({key.id for _, key in made}) == 2
    assert all(len(secret) >= 43 + len("sk-sluice-") for secret, _ in made)


def test_edits_at_once_lose_no_key(tmp_path: Path) -> None:
    def work() -> None:
        for _ in range(5):
            edit(tmp_path / "keys.json", add(new_key(tenant="acme")[1]))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_key_file(tmp_path / "keys.json").keys) == 20


def test_a_change_that_fails_leaves_the_file_and_nothing_else(tmp_path: Path) -> None:
    before = write(tmp_path / "keys.json", ENTRY).read_bytes()

    def fail(content: KeyFile) -> KeyFile:
        raise LookupError

    with pytest.raises(LookupError):
        edit(tmp_path / "keys.json", fail)
    assert (tmp_path / "keys.json").read_bytes() == before
    assert os.listdir(tmp_path) == ["keys.json"]


def test_a_link_to_the_file_stays_a_link(tmp_path: Path) -> None:
    write(tmp_path / "real.json", ENTRY)
    (tmp_path / "keys.json").symlink_to("real.json")
    edit(tmp_path / "keys.json", lambda content: KeyFile())
    assert (tmp_path / "keys.json").is_symlink()
    assert read_key_file(tmp_path / "real.json").keys == ()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("{", "Invalid JSON"),
        ('{"keys": {}}', "keys: "),
        ('{"key": []}', "key: "),
        (json.dumps({"keys": [{**ENTRY, "rate": 1}]}), "keys[0].rate: "),
        (json.dumps({"keys": [ENTRY, {**ENTRY, "sha256": "x"}]}), "keys[1].sha256: "),
        (json.dumps({"keys": [{**ENTRY, "requests_per_minute": 0}]}), "keys[0].requests_per_minute: "),
        (json.dumps({"keys": [{**ENTRY, "expires": "2027-01-01"}]}), "keys[0].expires: "),
        (json.dumps({"keys": [{**ENTRY, "lanes": ["fast"]}]}), "keys[0].lanes[0]: "),
        (json.dumps({"keys": [{**ENTRY, "models": ["a", "gpt-*"]}]}), "keys[0].models: Value error, 'gpt-*' has a *; "),
        (json.dumps({"keys": [ENTRY, {**ENTRY, "id": "k-2"}]}), "Value error, two keys have the same sha256"),
    ],
)
def test_a_broken_file_is_refused_with_the_place_and_without_the_value(tmp_path: Path, text: str, place: str) -> None:
    (tmp_path / "keys.json").write_text(text)
    with pytest.raises(BadKeyFile) as refused:
        read_key_file(tmp_path / "keys.json")
    assert str(refused.value).startswith(f"{tmp_path / 'keys.json'}: {place}")
    assert key_digest("secret") not in str(refused.value)


def test_a_missing_file_does_not_start_a_gateway(tmp_path: Path) -> None:
    with pytest.raises(BadKeyFile, match="No such file"):
        KeyStore(tmp_path / "keys.json")


async def test_only_the_secret_itself_finds_its_key(tmp_path: Path) -> None:
    keys = KeyStore(write(tmp_path / "keys.json", ENTRY), 0.0)
    found = await keys.find("secret")
    assert found is not None
    assert found.id == "k-1"
    for wrong in ("", "secre", "secret ", "Secret", key_digest("secret"), "k-1", "\udcff", "é"):
        assert await keys.find(wrong) is None, wrong


async def test_a_key_is_refused_from_the_time_at_which_it_expires(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    for late_s, is_found in ((3600, True), (-1, False)):
        expires = (now + timedelta(seconds=late_s)).isoformat()
        keys = KeyStore(write(tmp_path / "keys.json", {**ENTRY, "expires": expires}), 0.0)
        assert (await keys.find("secret") is not None) == is_found


async def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    keys = KeyStore(write(tmp_path / "keys.json", ENTRY), 0.0)
    write(tmp_path / "keys.json", {**ENTRY, "sha256": key_digest("another")})
    assert await keys.find("secret") is None
    assert await keys.find("another") is not None


@pytest.mark.parametrize("broken", ["{", '{"keys": [{}]}', None])
async def test_a_file_that_breaks_keeps_the_old_keys_and_logs_one_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str | None
) -> None:
    path = write(tmp_path / "keys.json", ENTRY)
    keys = KeyStore(path, 0.0)
    if broken is None:
        path.unlink()
    else:
        path.write_text(broken)
    for _ in range(3):
        assert await keys.find("secret") is not None
    (logged,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert logged.startswith(f"{path}: ")
    write(path, {**ENTRY, "sha256": key_digest("another")})
    assert await keys.find("another") is not None


async def test_the_file_is_looked_at_once_a_second_at_most(tmp_path: Path) -> None:
    keys = KeyStore(write(tmp_path / "keys.json", ENTRY), check_s=60.0)
    write(tmp_path / "keys.json")
    assert await keys.find("secret") is not None


async def test_a_file_that_could_not_be_read_once_is_read_again_without_a_further_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "keys.json", ENTRY)
    keys = KeyStore(path, 0.0)
    write(path, {**ENTRY, "sha256": key_digest("another")})

    def fail(path: Path) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", fail)
        for _ in range(3):
            assert await keys.find("secret") is not None
    assert await keys.find("secret") is None
    assert await keys.find("another") is not None
    assert [record.levelname for record in caplog.records if record.name == "sluice.gateway"].count("ERROR") == 1
