"""The view of `sluice top` fits into the terminal, and no part of it hides another."""

import io
import re
import time
from typing import Any

import pytest
from rich.console import Console

from sluice.cli.commands.top import TopView
from sluice.cli.errors import CliError
from sluice.presence import HOST

URL = "redis://:secret@127.0.0.1:6379/0"
_MEASURED = (
    "jobs_per_s", "tokens_per_s", "ttft_p50_ms", "ttft_p95_ms", "gap_p50_ms", "gap_p95_ms", "prefix_hit_rate",
    "claims_left", "claims_overruled", "prefix_hint_rate", "prefix_cache_bytes", "memory_bytes",
    "memory_limit_bytes", "started_at", "step_share", "offline_step_share",
)  # fmt: skip


def sample(*, workers: int, tenants: int, runs: int, name: str = "mac") -> dict[str, Any]:
    known = {"model": "default", "version": "1", "state": "running", "rows": 1, "max_rows": 4, "offline_rows": 2}
    done = {"total": 10, "completed": 4, "failed": 1, "paused": False}
    lane = {"model": "default", "lane": "interactive"}
    load = {"loading": None, "rows": 1, "max_rows": 4, "tokens_per_s": 0}
    return {
        "at": time.time() - 65,
        "workers": [
            {"name": f"{name}-{k}", **known, **dict.fromkeys(_MEASURED), **dict.fromkeys(HOST, "")}
            for k in range(workers)
        ],
        "models": [{"model": "default", "workers": workers, **load, "claims_left": 12, "claims_overruled": 3}],
        "queues": [{**lane, "jobs": 900, "running": 0, "waiting": 300, "oldest_s": 9.0, "complete": False}],
        "tenants": [{**lane, "tenant": f"tenant-{k}", "waiting": 1, "oldest_s": float(k)} for k in range(tenants)],
        "runs": [{"id": f"batch_{k}", "status": "in_progress", **done} for k in range(runs)],
        "absent": [],
    }


def drawn(view: TopView, width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height)
    console.print(view)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def live(found: dict[str, Any]) -> TopView:
    view = TopView(URL)
    view.update(found)
    return view


@pytest.mark.parametrize("size", [(80, 24), (120, 24), (120, 60), (60, 24)], ids=str)
@pytest.mark.parametrize("counts", [(1, 100, 1), (100, 2, 0), (50, 50, 50), (2, 5, 2)], ids=str)
def test_every_part_is_seen_and_what_is_hidden_is_counted(size: tuple[int, int], counts: tuple[int, int, int]) -> None:
    workers, tenants, runs = counts
    lines = drawn(live(sample(workers=workers, tenants=tenants, runs=runs)), *size)
    assert (len(lines) <= size[1], max(map(len, lines)) <= size[0]) == (True, True), lines
    for part, number in (("mac-", workers), ("tenant-", tenants), ("batch_", runs)):
        shown = sum(line.startswith(part) for line in lines)
        assert shown == number or f"and {number - shown} more" in lines, lines
        assert shown or not number


def test_a_sample_that_is_printed_is_whole_however_low_the_terminal() -> None:
    lines = drawn(TopView(URL, sample(workers=30, tenants=30, runs=30)), 80, 24)
    assert [sum(line.startswith(part) for line in lines) for part in ("mac-", "tenant-", "batch_")] == [30, 30, 30]


def test_the_longest_waiting_tenants_are_first_and_unread_jobs_are_marked() -> None:
    lines = drawn(live(sample(workers=1, tenants=9, runs=0)), 80, 24)
    assert [line.split()[0] for line in lines if line.startswith("tenant-")][:2] == ["tenant-8", "tenant-7"]
    assert any(re.match(r"default +1 +1/4 +0 +12/3 +– +300\+ wait +9s", line) for line in lines), lines


def test_an_outage_is_told_beside_the_last_sample_without_the_password() -> None:
    view = live(sample(workers=100, tenants=3, runs=0))
    view.update(CliError("no server answers at " + "x" * 200))
    lines = drawn(view, 80, 24)
    said = " ".join(lines)
    assert ("Last seen 1 min 5 s ago. Trying again." in said, "secret" in said) == (True, False)
    assert (len(lines) <= 24, any(line.startswith("tenant-0") for line in lines)) == (True, True)
    view.update(sample(workers=1, tenants=0, runs=0))
    assert "Trying again." not in " ".join(drawn(view, 80, 24))


def test_wide_and_control_characters_of_a_name_do_not_break_the_table() -> None:
    lines = drawn(live(sample(workers=1, tenants=0, runs=0, name="工" * 60 + "\x1b[2J\n")), 80, 24)
    (worker,) = (line for line in lines if line.startswith("工"))
    assert ("\x1b" in worker, "1/4" in worker, len(lines) <= 24) == (False, True, True)


@pytest.mark.parametrize(("width", "of_worker", "of_model"), [(60, 0, 0), (80, 0, 1), (120, 0, 1), (140, 1, 1)])
def test_decisions_of_claims_are_shown_where_there_is_room(width: int, of_worker: int, of_model: int) -> None:
    found = sample(workers=2, tenants=0, runs=0)
    found["workers"][0] |= {"claims_left": 1_040, "claims_overruled": 7, "prefix_hint_rate": 0.956}
    lines = drawn(live(found), width, 24)
    assert sum(" 96% " in line and " 1,040/7 " in line for line in lines) == of_worker
    assert sum(" 96% " in line and " 12/3 " in line for line in lines) == of_model


def test_what_is_left_to_others_on_a_machine_is_noted_for_a_few_workers() -> None:
    seen = sample(workers=5, tenants=0, runs=0)
    view = TopView(URL, seen)
    assert not any("mac-0:" in line for line in drawn(view, 80, 40))
    seen["workers"][0] |= {
        "machine": "awake",
        "memory_pressure": "normal",
        "memory_reclaim": "nothing",
        "step_share": 1,
    }
    assert not any("mac-0:" in line for line in drawn(view, 80, 40))
    pressed = {"machine": "in_use on_battery awake", "memory_pressure": "critical", "memory_reclaim": "offline_rows"}
    for each in seen["workers"]:
        each |= {**pressed, "offline_step_share": 0.25}
    lines = drawn(view, 160, 40)
    notes = "in use; on battery; memory critical, gives back offline rows; offline jobs have 25% of the time"
    assert [line.strip() for line in lines[1:3]] == [f"mac-{k}: {notes}" for k in range(2)]
    assert lines[3].strip() == "and 3 more workers leave something to others on their machines"
