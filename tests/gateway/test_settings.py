"""The settings of `sluice serve`, and one `.env` for a gateway and a worker."""

import os
from pathlib import Path

import pytest

from sluice.contract.redis_url import MapFile
from sluice.gateway.settings import (
    PREFIX,
    CannotServe,
    ServeSettings,
    gateway_variable,
    read_redis_url,
    read_serve_settings,
    read_variables,
)
from worker.environment import PREFIX as OURS
from worker.environment import refuse_unknown
from worker.settings import Settings
from worker.settings import read_settings as read_worker_settings


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder, and no variable of ours."""
    for name in [name for name in os.environ if name.startswith(OURS)]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def refusal() -> str:
    with pytest.raises(CannotServe) as refused:
        read_serve_settings()
    return str(refused.value)


def test_one_env_file_starts_a_worker_and_a_gateway() -> None:
    Path(".env").write_text(
        "SLUICE_REDIS_URL=redis://here:1/0\nSLUICE_MODEL=m\nSLUICE_SERVE_PORT=9\nSLUICE_SERVE_MODELS=gpt-4o=tiny\n"
    )
    assert (read_serve_settings().port, read_serve_settings().model_map) == (9, {"gpt-4o": "tiny"})
    assert read_redis_url("redis://default") == read_worker_settings().redis_url == "redis://here:1/0"


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("SLUICE_REDIS_URL=redis://a/0", "redis://a/0"),
        ("SLUICE_REDIS_URL=redis://a/0 # ours", "redis://a/0"),
        ("SLUICE_REDIS_URL='redis://a/0' # ours", "redis://a/0"),
        ('export SLUICE_REDIS_URL = "redis://a/0"', "redis://a/0"),
        ("  export  sluice_redis_url=redis://a/0", "redis://a/0"),
        ("HOST_OF_REDIS=a\nSLUICE_REDIS_URL=redis://${HOST_OF_REDIS}/0", "redis://a/0"),
        ("# SLUICE_REDIS_URL=redis://b/0\nSLUICE_REDIS_URL=redis://a/0", "redis://a/0"),
        ('OTHER="\nSLUICE_REDIS_URL=redis://b/0\n"\nSLUICE_REDIS_URL=redis://a/0', "redis://a/0"),
    ],
)
def test_the_file_means_the_same_to_a_worker_and_a_gateway(line: str, value: str) -> None:
    Path(".env").write_text(f"SLUICE_MODEL=m # a comment\nSLUICE_SERVE_KEYS=k.json # too\n{line}\n")
    assert read_redis_url("redis://default") == read_worker_settings().redis_url == value
    assert read_variables(Path(".env"))["SLUICE_SERVE_KEYS"] == str(read_serve_settings().keys) == "k.json"


def test_a_name_within_a_value_of_several_lines_is_no_setting() -> None:
    Path(".env").write_text('SLUICE_MODEL=m\nNOTE="\nSLUICE_SERVE_PROT=9\nSLUICE_MODLE=m\n"\n')
    assert read_serve_settings() == ServeSettings()
    assert read_worker_settings().model == "m"


def test_a_misspelt_name_is_refused_with_the_nearest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_SERVE_PROT", "9")
    assert refusal() == "SLUICE_SERVE_PROT is not a setting; did you mean SLUICE_SERVE_PORT?"
    refuse_unknown(Settings.model_fields, Path(".env"))  # the worker leaves it to the gateway


def test_a_misspelt_name_in_the_file_is_refused_too() -> None:
    Path(".env").write_text("export SLUICE_SERVE_PROT=9\n")
    assert refusal() == "SLUICE_SERVE_PROT is not a setting; did you mean SLUICE_SERVE_PORT?"


def test_settings_of_the_worker_are_none_of_the_gateway_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_MAX_ROWS", "many")
    assert read_serve_settings() == ServeSettings()


def test_the_environment_wins_over_the_file_and_an_option_over_both(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(".env").write_text("SLUICE_SERVE_PORT=1\nSLUICE_SERVE_HOST=localhost\n")
    monkeypatch.setenv("SLUICE_SERVE_PORT", "2")
    settings = read_serve_settings()
    assert (settings.port, read_serve_settings(port=3).port, settings.host) == (2, 3, "localhost")


@pytest.mark.parametrize(
    ("pairs", "problem"),
    [
        (
            "claude*haiku=tiny",
            "'claude*haiku=tiny' has a * before the end of the name; write it last, as in claude-*=default",
        ),
        ("*-haiku=tiny", "'*-haiku=tiny' has a * before the end of the name; write it last, as in claude-*=default"),
        ("a=b,c=d,a=e", "'a' is mapped twice; leave one of the pairs out"),
    ],
)
def test_a_pair_that_could_never_match_is_refused(monkeypatch: pytest.MonkeyPatch, pairs: str, problem: str) -> None:
    monkeypatch.setenv("SLUICE_SERVE_MODELS", pairs)
    assert refusal() == f"SLUICE_SERVE_MODELS: {problem}"


@pytest.mark.parametrize("pairs", ["gpt", "=a", "a=", "a=b c", "a=b,", " a=b"])
def test_a_pair_of_models_needs_both_and_a_name_that_can_be_served(monkeypatch: pytest.MonkeyPatch, pairs: str) -> None:
    monkeypatch.setenv("SLUICE_SERVE_MODELS", pairs)
    assert refusal().startswith("SLUICE_SERVE_MODELS: ")
    assert refusal().endswith(" must look like gpt-4o-mini=default")


THEIR_WORDS = ("Input should", "String should", "Value error", "unable to")


@pytest.mark.parametrize("field", sorted(ServeSettings.model_fields))
def test_no_setting_s_error_is_left_to_the_library_s_words(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    for value in ["", " ", "many", "nan", "inf", "-1", "1e400", "9" * 5000, "1.5", "[]", "é"]:
        monkeypatch.setenv(gateway_variable(field), value)
        said = refusal_or_nothing()
        assert not said or said.startswith(f"{PREFIX}{field.upper()}: "), value
        assert [theirs for theirs in THEIR_WORDS if theirs in said] == [], value


def refusal_or_nothing() -> str:
    try:
        read_serve_settings()
    except CannotServe as refused:
        return str(refused)
    return ""


def test_a_larger_body_raises_the_bytes_that_are_held() -> None:
    assert ServeSettings(max_body_bytes=300_000_000).max_held_bytes == 300_000_000
    assert ServeSettings(max_body_bytes=1_000).max_held_bytes == 256_000_000


def test_a_map_takes_the_place_of_the_url_unless_the_environment_empties_it(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("servers.toml").write_text('default = "redis://here:1/0"\n')
    Path(".env").write_text("SLUICE_REDIS_URL=redis://here:2/0\nSLUICE_REDIS_URLS=servers.toml\nSLUICE_MODEL=m\n")
    assert (read_redis_url("redis://default"), read_worker_settings().redis_url) == (
        MapFile("servers.toml"), "redis://here:1/0",
    )  # fmt: skip
    assert isinstance(read_redis_url("redis://default"), MapFile)
    monkeypatch.setenv("SLUICE_REDIS_URLS", "")  # as `sluice up` does for its parts
    assert (read_redis_url("redis://default"), read_worker_settings().redis_url) == ("redis://here:2/0",) * 2
