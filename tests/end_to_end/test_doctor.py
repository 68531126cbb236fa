"""`sluice doctor`, which checks a machine and a server as they are."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.test_cli import Command
from tests.support.stack import TINY_CHAT, Server, free_port

Findings = dict[str, list[tuple[str, str]]]


def examine(sluice: Command, *options: str) -> tuple[int, Findings]:
    """Return the exit code, and the state and text of the findings by subject."""
    code, out, _ = sluice("doctor", "--json", *options)
    found: Findings = {}
    for each in json.loads(out)["findings"]:
        found.setdefault(each["subject"], []).append((each["state"], each["text"]))
    return code, found


def test_a_machine_that_can_serve_has_no_problem(sluice: Command) -> None:
    sluice.env["SLUICE_SERVE_PORT"] = str(free_port())
    code, found = examine(sluice, "--model", str(TINY_CHAT))
    assert code == 0
    assert {state for lines in found.values() for state, _ in lines} <= {"ok", "warning"}
    assert found["model"] == [("ok", f"{TINY_CHAT} can be served; `sluice check` has its numbers")]
    assert "ms to it and back" in found["Redis"][0][1]
    assert found["clock"][0][0] == "ok"
    assert "SLUICE_REDIS_URL" in found["settings"][0][1]


@pytest.fixture
def evicting(sluice: Command) -> Iterator[Command]:
    sluice.db.config_set("maxmemory-policy", "allkeys-lru")
    yield sluice
    sluice.db.config_set("maxmemory-policy", "noeviction")


def test_a_server_that_evicts_is_a_warning_with_its_remedy(evicting: Command) -> None:
    code, found = examine(evicting)
    assert code == 0
    assert any(
        state == "warning" and "CONFIG SET maxmemory-policy noeviction" in text for state, text in found["Redis"]
    )


@pytest.mark.parametrize(
    ("name", "value", "subject", "said"),
    [
        ("SLUICE_REDIS_URL", "redis://user:secret@127.0.0.1:1/0", "Redis", "Start a server"),
        ("SLUICE_MAX_ROWS", "no", "settings", "SLUICE_MAX_ROWS=no"),
        ("SLUICE_MEMORY_GB", "0.5", "memory", "SLUICE_MEMORY_HEADROOM_GB"),
        ("SLUICE_MODEL", "nowhere/at/all", "model", "nowhere/at/all"),
        ("SLUICE_SERVE_PORT", "many", "gateway", "SLUICE_SERVE_PORT"),
    ],
)
def test_each_problem_is_told_with_its_remedy_and_no_secret(
    sluice: Command, name: str, value: str, subject: str, said: str
) -> None:
    sluice.env[name] = value
    code, found = examine(sluice)
    assert code == 1
    assert [state for state, text in found[subject] if said in text] == ["problem"]
    assert "secret" not in json.dumps(found)


def own_address() -> str:
    """Return an address of this machine by which others reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no network")
        return str(probe.getsockname()[0])


def test_a_server_in_protected_mode_is_told_from_one_that_is_not_there(sluice: Command) -> None:
    with Server(args=("--bind", "0.0.0.0", "--protected-mode", "yes")) as server:
        sluice.env["SLUICE_REDIS_URL"] = f"redis://{own_address()}:{server.port}/0"
        code, found = examine(sluice)
    assert code == 1
    assert [state for state, text in found["Redis"] if "it is in protected mode" in text] == ["problem"]


def test_a_port_that_is_taken_is_a_warning(sluice: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        sluice.env["SLUICE_SERVE_PORT"] = str(taken.getsockname()[1])
        assert [state for state, _ in examine(sluice)[1]["SLUICE_SERVE_PORT"]] == ["warning"]


def test_a_folder_that_does_not_exist_yet_is_looked_for_above(sluice: Command, tmp_path: Path) -> None:
    sluice.env["SLUICE_BATCH_DIR"] = str(tmp_path / "new" / "folder")
    assert "free" in examine(sluice)[1]["SLUICE_BATCH_DIR"][0][1]
    sluice.env["SLUICE_BATCH_DIR"] = str(tmp_path / ("long" * 100))  # stat fails, as in a folder of another user
    assert "free" in examine(sluice)[1]["SLUICE_BATCH_DIR"][0][1]
