"""Names and values in the environment. `tests/test_settings.py` has the sentences that an operator reads."""

import os
from pathlib import Path

import pytest

from worker.environment import PREFIX, child_environment, refuse_unknown, variable
from worker.errors import CannotStart


def test_a_child_has_our_server_in_its_environment_and_not_on_its_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLUICE_REDIS_URL", "redis://elsewhere")
    monkeypatch.setenv("OTHER", "stays")
    monkeypatch.setenv("SLUICE_URL", "http://gateway")  # beside a Redis server it would be refused
    given = child_environment("redis://:secret@here", "map.toml")
    assert (given["SLUICE_REDIS_URL"], given["OTHER"]) == ("redis://:secret@here", "stays")
    assert (given["SLUICE_REDIS_URLS"], "SLUICE_URL" in given) == ("map.toml", False)
    assert child_environment("redis://here", None)["SLUICE_REDIS_URLS"] == ""


@pytest.fixture
def env_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file to be written, and no variable of ours in the environment."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    return tmp_path / ".env"


@pytest.mark.parametrize("text", ["", "SLUICE_ROWS=4\n", "OTHER=4\n", "# SLUICE_OTHER=4\n"])
def test_names_of_fields_and_of_other_programs_are_accepted(env_file: Path, text: str) -> None:
    refuse_unknown(["rows"], env_file)
    env_file.write_text(text)
    refuse_unknown(["rows"], env_file)


def test_a_name_of_ours_without_a_field_is_refused_with_the_nearest_one(env_file: Path) -> None:
    env_file.write_text("SLUICE_LEASES=4\n")
    with pytest.raises(CannotStart, match=f"did you mean {variable('lease_s')}\\?"):
        refuse_unknown(["rows", "lease_s"], env_file)
