import base64
import re
import socket
from pathlib import Path

import pytest

from sluice.gateway.settings import ServeSettings, gateway_variable
from tests.support.stack import ROOT
from worker.engine.options import EngineOptions
from worker.environment import variable
from worker.errors import CannotStart
from worker.prefix_store.store import StoreOptions
from worker.settings import Settings, read_settings

WITHOUT_DEFAULT = {"SLUICE_MODEL"}


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder, and no variable of ours but the one that is required."""
    for name in map(variable, Settings.model_fields):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLUICE_MODEL", "some/model")
    monkeypatch.chdir(tmp_path)


def sentence() -> str:
    with pytest.raises(CannotStart) as raised:
        read_settings()
    return str(raised.value)


def test_a_misspelt_variable_is_refused_with_the_one_that_was_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_MAX_ROW", "4")
    assert sentence() == "SLUICE_MAX_ROW is not a setting; did you mean SLUICE_MAX_ROWS?"


def test_a_variable_that_resembles_none_points_to_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_XYZZY", "4")
    assert sentence() == "SLUICE_XYZZY is not a setting; see .env.example for the names."


def test_a_misspelt_name_in_the_file_is_refused_too() -> None:
    Path(".env").write_text("# SLUICE_COMMENT=1\nexport SLUICE_MAX_ROW = 4\n")
    assert sentence() == "SLUICE_MAX_ROW is not a setting; did you mean SLUICE_MAX_ROWS?"


def test_variables_of_others_are_none_of_our_business(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICEGATE", "open")
    for name in ("TEST_REDIS_URL", "URL", "API_KEY", "BATCH_ID", "BATCH_STATUS", "BATCH_OUTPUT", "BATCH_ERRORS"):
        monkeypatch.setenv(f"SLUICE_{name}", "of a client")
    Path(".env").write_text("DATABASE_URL=postgres://\n")
    read_settings()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("SLUICE_MAX_ROWS", "many", "SLUICE_MAX_ROWS=many: it must be a whole number"),
        ("SLUICE_MAX_ROWS", "0", "SLUICE_MAX_ROWS=0: it must be at least 1"),
        ("SLUICE_LEASE_S", "0.1", "SLUICE_LEASE_S=0.1: it must be at least 1"),
        ("SLUICE_STEP_MS", "0", "SLUICE_STEP_MS=0: it must be more than 0"),
        ("SLUICE_LOG_LEVEL", "LOUD", "SLUICE_LOG_LEVEL=LOUD: it must be 'DEBUG', 'INFO', 'WARNING' or 'ERROR'"),
        ("SLUICE_MODEL_NAME", "a b", "SLUICE_MODEL_NAME=a b: it must match"),
        ("SLUICE_KEYSPACE_EVENTS", "perhaps", "SLUICE_KEYSPACE_EVENTS=perhaps: it must be true or false"),
        ("SLUICE_RESERVED_ROWS", "16", "SLUICE_RESERVED_ROWS=16: 16 of 16 rows reserved"),
        (
            "SLUICE_BATCH_SCHEDULE",
            "2:00",
            "SLUICE_BATCH_SCHEDULE=2:00: a crontab expression has five fields, and this has 1: ",
        ),
        (
            "SLUICE_BATCH_SCHEDULE",
            "0 25 * * *",
            "SLUICE_BATCH_SCHEDULE=0 25 * * *: its hour is not valid: ",
        ),
        (
            "SLUICE_BATCH_MODELS",
            "a=b,gpt-4o",
            "SLUICE_BATCH_MODELS=a=b,gpt-4o: 'gpt-4o' must look like gpt-4o-mini=default",
        ),
        ("SLUICE_PREFIX_DISK_BITS", "4", "SLUICE_PREFIX_DISK_BITS=4: it must be 'exact' or '8'"),
        ("SLUICE_BATCH_HOURS", "22-6", "SLUICE_BATCH_HOURS=22-6: hours look like 22:00-06:00"),
        ("SLUICE_BATCH_HOURS", "", "SLUICE_BATCH_HOURS=: hours look like 22:00-06:00"),
        ("SLUICE_BATCH_OFF_HOURS_ROWS", "-1", "SLUICE_BATCH_OFF_HOURS_ROWS=-1: it must be at least 0"),
        ("SLUICE_BATCH_DIR", "", "SLUICE_BATCH_DIR=: it must not be empty"),
        ("SLUICE_RESULT_TTL_S", "599", "SLUICE_RESULT_TTL_S=599: a job's state must be kept at least"),
    ],
)
def test_a_bad_value_is_named_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    assert sentence().startswith(said)


@pytest.mark.parametrize("name", ["SLUICE_MTP_MODEL", "SLUICE_DRAFT_MODEL"])
def test_what_drafts_is_refused_if_nothing_is_drafted(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "a/b")
    monkeypatch.setenv("SLUICE_SPECULATION", "off")
    said = f"{name}=a/b: with SLUICE_SPECULATION=off nothing is drafted; set it to auto, or leave this out"
    assert sentence().startswith(said)


def test_an_empty_url_of_the_server_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_REDIS_URL", "")
    assert read_settings().redis_url == Settings.model_fields["redis_url"].default == "redis://localhost:6379/0"


def test_a_url_without_its_scheme_is_shown_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_REDIS_URL", ":kumquat@localhost:16379")
    assert (
        sentence()
        == "SLUICE_REDIS_URL=***@localhost:16379: it must begin with redis://, rediss://, unix:// or redis+sentinel://"
    )


@pytest.mark.parametrize("pairs", ["", "=default", "gpt=", "gpt=a b", "a=b,", ",a=b", "a=b, c=d", " =b", "a=b=c"])
def test_a_pair_of_models_needs_both_and_a_name_that_can_be_served(monkeypatch: pytest.MonkeyPatch, pairs: str) -> None:
    monkeypatch.setenv("SLUICE_BATCH_MODELS", pairs)
    assert sentence().startswith(f"SLUICE_BATCH_MODELS={pairs}: ")


@pytest.mark.parametrize("pairs", ["*=default", "gpt-4o-mini=tiny,*=big", "ft:gpt-4o:org::id=tiny"])
def test_pairs_of_models_are_kept_as_they_were_said(monkeypatch: pytest.MonkeyPatch, pairs: str) -> None:
    monkeypatch.setenv("SLUICE_BATCH_MODELS", pairs)
    assert read_settings().batch_models == pairs


def test_all_bad_values_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_MAX_ROWS", "0")
    monkeypatch.setenv("SLUICE_GRACE_S", "-1")
    assert re.findall(r"SLUICE_\w+", sentence()) == ["SLUICE_MAX_ROWS", "SLUICE_GRACE_S"]


def test_fewer_rows_than_are_reserved_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_MAX_ROWS", "2")
    monkeypatch.setenv("SLUICE_RESERVED_ROWS", "2")
    assert "2 of 2 rows reserved leaves none for offline jobs" in sentence()


@pytest.mark.parametrize(
    ("variable", "given", "follows", "value"),
    [
        ("SLUICE_MAX_ROWS", "1", "reserved_rows", 0),
        ("SLUICE_MAX_ROWS", "2", "reserved_rows", 1),
        ("SLUICE_MAX_ROWS", "3", "reserved_rows", 2),
        ("SLUICE_LOG_TTL_S", "7200", "result_ttl_s", 7200),
        ("SLUICE_LOG_TTL_S", "60", "result_ttl_s", 3600),
    ],
)
def test_no_default_makes_another_setting_invalid(
    monkeypatch: pytest.MonkeyPatch, variable: str, given: str, follows: str, value: int
) -> None:
    monkeypatch.setenv(variable, given)
    assert getattr(read_settings(), follows) == value


def test_a_missing_model_is_asked_for_by_variable_and_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLUICE_MODEL")
    assert sentence().startswith("SLUICE_MODEL is not set; set it, or give --model: ")


@pytest.mark.parametrize("name", ["SLUICE_PREFIX_DISK_DIR", "SLUICE_PREFIX_WARM"])
def test_a_prefix_needs_a_cache_in_memory(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("SLUICE_PREFIX_CACHE_GB", "0")
    monkeypatch.setenv(name, "/somewhere")
    assert (
        sentence()
        == f"{name}=/somewhere: it needs the prefix cache in memory; let SLUICE_PREFIX_CACHE_GB be more than 0"
    )


@pytest.mark.parametrize("key", ["", "kumquat", "kumquat" * 8])
def test_a_key_of_the_disk_is_not_shown_in_its_error(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("SLUICE_PREFIX_DISK_KEY", key)
    assert sentence().startswith("SLUICE_PREFIX_DISK_KEY=***: it must be 32 bytes in base64")


def test_a_key_of_the_disk_is_not_shown_with_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    key = base64.b64encode(bytes(range(32))).decode()
    monkeypatch.setenv("SLUICE_PREFIX_DISK_KEY", key)
    settings = read_settings()
    assert settings.prefix_disk_key == key
    assert key not in repr(settings)


def test_settings_come_from_the_file() -> None:
    Path(".env").write_text("SLUICE_MAX_ROWS=4\nSLUICE_MODEL_NAME=tiny\n")
    read = read_settings()
    assert (read.max_rows, read.model_name) == (4, "tiny")


def test_the_environment_wins_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(".env").write_text("SLUICE_MAX_ROWS=4\n")
    monkeypatch.setenv("SLUICE_MAX_ROWS", "8")
    assert read_settings().max_rows == 8


def test_two_workers_of_one_machine_have_different_names(monkeypatch: pytest.MonkeyPatch) -> None:
    name = read_settings().worker_name
    assert name.startswith(f"{socket.gethostname()}-")
    monkeypatch.setattr("os.getpid", lambda: 0)
    assert read_settings().worker_name != name


def test_settings_cannot_be_changed_once_read() -> None:
    with pytest.raises(ValueError, match="frozen"):
        read_settings().max_rows = 1  # type: ignore[misc]


def example() -> dict[str, str]:
    """Name to value, as they stand in the file; a value that is commented out has no default."""
    lines = (ROOT / ".env.example").read_text().splitlines()
    pairs = [re.fullmatch(r"(?:# )?(SLUICE_[A-Z_]+)=(.*)", line) for line in lines]
    return {pair[1]: pair[2] for pair in pairs if pair}


def test_the_example_lists_every_setting_once() -> None:
    gateway = [gateway_variable(name) for name in ServeSettings.model_fields]
    assert sorted(example()) == sorted([*(variable(name) for name in Settings.model_fields), *gateway])


def test_the_example_shows_the_defaults() -> None:
    Path(".env").write_text((ROOT / ".env.example").read_text())
    shown, silent = read_settings().model_dump(), read_settings(_env_file=None).model_dump()
    assert {k: v for k, v in shown.items() if variable(k) not in WITHOUT_DEFAULT} == {
        k: v for k, v in silent.items() if variable(k) not in WITHOUT_DEFAULT
    }


def test_every_name_in_the_example_is_explained() -> None:
    lines = (ROOT / ".env.example").read_text().splitlines()
    for name in example():
        at = next(i for i, line in enumerate(lines) if re.match(rf"(# )?{name}=", line))
        assert lines[at - 1].startswith("# "), f"{name} stands there without a word"


def test_the_environment_is_read_in_one_module_only() -> None:
    """Else a setting could be read that is refused as unknown, or that nobody lists. A child process inherits it."""
    readers = {name for name, code in modules().items() if re.search(r"os\.(environ|getenv)", code)}
    assert readers == {"worker/process/child.py", "worker/environment.py"}


def modules() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "worker").rglob("*.py")}


def test_every_setting_is_used_somewhere() -> None:
    sources = modules()
    own = sources.pop("worker/settings.py")  # fills the engine's options
    code = "".join(sources.values())
    used = {name for name in Settings.model_fields if re.search(rf"settings\.{name}\b", code)}
    assert [name for name in Settings.model_fields if name not in used and f"self.{name}" not in own] == []


def test_the_engine_gets_its_options_in_its_own_units(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = {
        "MODEL": "m", "STEP_MS": "50", "MAX_ROWS": "4", "PREFIX_CACHE_GB": "1.5", "PREFIX_DISK_DIR": str(tmp_path),
        "PREFIX_DISK_GB": "2", "PREFIX_DISK_BITS": "8", "SPECULATION": "auto",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(f"SLUICE_{name}", value)
    disk = StoreOptions(tmp_path, 2_000_000_000, 10_000_000_000, label="m")
    assert read_settings().engine_options(7_000) == EngineOptions(
        0.05, rows=4, memory=7_000, prefix_bytes=1_500_000_000, disk=disk, disk_bits=8, speculation=True
    )


def test_without_a_folder_prefixes_are_stored_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_MODEL", "m")
    options = read_settings().engine_options(7_000)
    assert (options.disk, options.disk_bits, options.prefix_bytes, options.pipelined) == (None, None, None, None)


THEIR_WORDS = ("Input should", "String should", "Value error", "unable to", "is not valid;")


@pytest.mark.parametrize("field", sorted(Settings.model_fields))
def test_no_setting_s_error_is_left_to_the_library_s_words(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    for value in ["", " ", "many", "nan", "inf", "-1", "1e400", "9" * 5000, "1.5", "[]", "é"]:
        monkeypatch.setenv(variable(field), value)
        said = _refusal_or_nothing()
        assert not said or said.startswith(f"{variable(field)}="), value
        assert [theirs for theirs in THEIR_WORDS if theirs in said] == [], value


def _refusal_or_nothing() -> str:
    try:
        read_settings()
    except CannotStart as refused:
        return str(refused)
    return ""
