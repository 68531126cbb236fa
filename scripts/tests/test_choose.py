"""The choice of a claim: which jobs a worker takes, and which it leaves to others that are done with them sooner."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from scripts.simulation.choose import Choice, Fleet, Job, choose, compute_ms, cost_ms, read_worker
from sluice.contract.scripts import read_lua

NOW = 1_000_000
IDLE = f"{NOW + 10_000} {NOW} 4 4 2000 800 500 220 0 0 0 0 0 0 0 0"  # 1,250 tokens/s

# Calls choose.lua as the twin is called; numbers are printed with all their digits.
HARNESS = """
local given, workers, out = cjson.decode(ARGV[1]), {}, { taken = {}, left = {}, kept = 0, overruled = 0 }
local function worker(wid)
  local text = given.fleet[wid]
  if workers[wid] == nil then workers[wid] = text and read_worker(wid, text, given.now) or false end
  return workers[wid]
end
local least, at = {}, 0
for _, wid in ipairs(given.least) do if worker(wid) then least[#least + 1] = worker(wid) end end
local choice = {
  me = worker(given.me), worker = worker, least = least, now = given.now, want = given.want,
  leaves = given.leaves,
  is_kept = function(_, taken) return taken >= given.share end,
  next_job = function()
    at = at + 1
    local job = given.jobs[at]
    if not job then return nil end
    local holders = {}
    for i, wids in ipairs(job.holders) do holders[i] = #wids > 0 and ' ' .. table.concat(wids, ' ') .. ' ' end
    return { id = job.id, queued = job.queued_ms, size = job.size, ends = job.ends, holders = holders,
      may_be_left = job.may_be_left, deadline = tonumber(job.deadline_ms) }
  end,
  in_turn = function(window)
    local first = 1
    for i = 2, #window do if window[i].rank < window[first].rank then first = i end end
    return first
  end,
  take = function(job, overruled)
    out.taken[#out.taken + 1] = { job.id, string.format('%.17g', job.held) }
    if overruled then out.overruled = out.overruled + 1 end
  end,
  leave = function(job, to) out.left[#out.left + 1] = { job.id, to.worker.wid } end,
  keep = function() out.kept = out.kept + 1 end,
}
local again = choose(choice)
local costs = {}
for wid, its in pairs(workers) do
  if its then
    local first, all = cost_ms(its, given.own, given.now)
    costs[wid] = { string.format('%.17g', first), string.format('%.17g', all),
      string.format('%.17g', compute_ms(its, 3000, 50000)) }
  end
end
out.costs = costs
if again then
  out.scanned, out.again = choice.scanned, again < math.huge and again or -1
end
return cjson.encode(out)
"""
WIDS = [f"w{k}" for k in range(6)]


def record(until: int, at: int, *rest: float) -> str:
    return " ".join(f"{number:g}" if isinstance(number, float) else str(number) for number in (until, at, *rest))


records = st.builds(
    record,
    st.sampled_from([NOW + 10_000] * 6 + [NOW, NOW - 1]),
    st.integers(NOW - 5000, NOW + 100),
    st.integers(0, 8),
    st.integers(1, 8),
    st.integers(0, 5000),
    st.integers(20, 2000),
    st.integers(0, 50_000),
    st.integers(100, 400),
    *(st.integers(0, 6000) | st.just(0), st.integers(0, 3)) * 4,
)


@st.composite
def jobs(draw: st.DrawFn) -> list[Job]:
    found = []
    for k in range(draw(st.integers(0, 40))):
        ends = sorted(draw(st.sets(st.integers(1, 48), max_size=5)))
        held = draw(st.booleans())
        holders = [draw(st.lists(st.sampled_from(WIDS), max_size=4, unique=True)) if held else [] for _ in ends]
        size = max([0, *ends]) * 1024 + draw(st.integers(0, 4000))
        queued = NOW - draw(st.integers(0, 40_000))
        deadline = draw(st.none() | st.integers(queued, queued + 200_000))
        may_be_left = draw(st.integers(0, 9)) > 0
        found.append(Job(f"j{k}", queued, size, [end * 1024 for end in ends], holders, may_be_left, deadline))
    return sorted(found, key=lambda job: job.queued_ms)


def in_python(given: dict[str, Any], waiting: list[Job]) -> dict[str, Any]:
    workers = {wid: read_worker(wid, text, NOW) for wid, text in given["fleet"].items()}
    me = workers[given["me"]]
    assert me
    least = [worker for wid in given["least"] if (worker := workers.get(wid))]
    choice = choose(Fleet(me, workers.get, least, NOW), waiting, given["want"], given["share"], leaves=given["leaves"])
    costs = {
        wid: [*cost_ms(each, given["own"], NOW), compute_ms(each, 3000, 50_000)]
        for wid, each in workers.items()
        if each
    }
    return {"choice": choice, "costs": costs}


def in_lua(server: redis.Redis, given: dict[str, Any], waiting: list[Job]) -> dict[str, Any]:
    text = json.dumps({**given, "jobs": [asdict(job) for job in waiting], "now": NOW})
    found = json.loads(
        server.eval(read_lua("sluice.contract", "fleet") + read_lua("worker.queue", "choose") + HARNESS, 0, text)
    )  # type: ignore[arg-type]
    choice = Choice(
        [(id, float(held)) for id, held in found["taken"] or []], [(id, wid) for id, wid in found["left"] or []]
    )
    if "scanned" in found:
        again = found["again"]
        choice = replace(choice, overruled=found["overruled"], again_ms=float("inf") if again < 0 else again)
        choice.scanned, choice.kept = found["scanned"], ["?"] * found["kept"]
    costs = {wid: [float(each) for each in row] for wid, row in found["costs"].items()}
    return {"choice": choice, "costs": costs}


@hypothesis_settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_lua_and_python_choose_the_same(server_url: str, data: st.DataObject) -> None:
    fleet = {wid: data.draw(records) for wid in WIDS}
    fleet["w0"] = data.draw(records.filter(lambda text: read_worker("w0", text, NOW) is not None))
    given_ = {
        "me": "w0",
        "fleet": fleet,
        "least": data.draw(st.lists(st.sampled_from(WIDS[1:]), max_size=2, unique=True)),
        "want": data.draw(st.integers(1, 8)),
        "share": data.draw(st.integers(0, 8)),
        "own": data.draw(st.integers(0, 8000)),
        "leaves": data.draw(st.booleans()),
    }
    waiting = data.draw(jobs())
    with redis.Redis.from_url(server_url) as server:
        lua, python = in_lua(server, given_, waiting), in_python(given_, waiting)
    assert lua["costs"] == {wid: [*row] for wid, row in python["costs"].items() if wid in lua["costs"]}
    ours = python["choice"]
    if not ours.knows:
        assert lua["choice"].taken == lua["choice"].left == []
        return
    assert replace(lua["choice"], kept=[]) == replace(ours, kept=[])
    assert len(lua["choice"].kept) == len(ours.kept)


def chosen(waiting: list[Job], want: int = 4, *, share: float = 8, leaves: bool = True, **fleet: str) -> Choice:
    workers = {wid: read_worker(wid, text, NOW) for wid, text in fleet.items()}
    me = workers["me"]
    assert me
    least = [worker for wid, worker in workers.items() if worker and wid != "me"][:2]
    return choose(Fleet(me, workers.get, least, NOW), waiting, want, share, leaves=leaves)


def test_a_job_is_left_to_its_holder_for_what_that_saves() -> None:
    job = Job("a", NOW - 1000, 40_960, [40_960], [["you"]])
    choice = chosen([job], me=IDLE, you=IDLE)
    me = read_worker("me", IDLE, NOW)
    assert me
    assert (choice.taken, choice.left) == ([], [("a", "you")])
    assert choice.again_ms == pytest.approx(compute_ms(me, 0, 40_960) - 1000, abs=1)
    late = replace(job, queued_ms=NOW - compute_ms(me, 0, 40_960))
    choice = chosen([late], me=IDLE, you=IDLE)
    assert (choice.taken, choice.overruled) == ([("a", 0)], 1)


def test_a_job_is_left_for_no_more_than_a_tenth_of_the_time_to_its_deadline() -> None:
    job = Job("a", NOW - 1000, 40_960, [40_960], [["you"]], deadline_ms=NOW + 19_000)
    choice = chosen([job], me=IDLE, you=IDLE)
    assert (choice.left, choice.again_ms) == ([("a", "you")], 1000)
    late = replace(job, queued_ms=NOW - 3000)
    choice = chosen([late], me=IDLE, you=IDLE)
    assert (choice.taken, choice.overruled) == ([("a", 0)], 1)


def test_a_claim_is_repeated_after_20_ms_at_the_earliest() -> None:
    job = Job("a", NOW - 1000, 40_960, [40_960], [["you"]], deadline_ms=NOW + 9_001)
    assert chosen([job], me=IDLE, you=IDLE).again_ms == 20


def test_a_job_of_this_workers_prefix_overtakes() -> None:
    waiting = [Job("old", NOW - 50, 40_960, [40_960], [[]]), Job("ours", NOW, 40_960, [40_960], [["me"]])]
    assert chosen(waiting, 1, me=IDLE, you=IDLE).taken == [("ours", 40_960)]


@pytest.mark.parametrize(
    "you",
    [
        IDLE.replace(f"{NOW + 10_000}", f"{NOW}"),  # its lease has expired
        "",
        IDLE + "x",
        IDLE.replace(f"{NOW} 4 4", f"{NOW} 0 4").replace("2000 800", "99000 800"),  # full for long
    ],
)
def test_a_job_is_not_left_to_a_worker_that_is_gone_or_full(you: str) -> None:
    job = Job("a", NOW, 40_960, [40_960], [["you"]])
    assert chosen([job], me=IDLE, you=you).left == []


def test_a_job_that_was_claimed_before_is_left_to_nobody() -> None:
    job = Job("a", NOW, 40_960, [40_960], [["you"]], may_be_left=False)
    assert chosen([job], me=IDLE, you=IDLE, share=0).taken == [("a", 0)]


def test_a_lane_that_leaves_nothing_ranks_and_shares_its_jobs() -> None:
    waiting = [Job(f"{k}", NOW - 9 + k, 40_960, [40_960], [["you" if k < 4 else "me"]]) for k in range(6)]
    choice = chosen(waiting, share=3, leaves=False, me=IDLE, you=IDLE)
    assert (choice.left, [id for id, _ in choice.taken], choice.kept) == ([], ["4", "5", "0"], ["1", "2", "3"])


def test_where_nobody_holds_anything_there_is_no_choice() -> None:
    choice = chosen([Job(f"{k}", NOW, 40_960, [40_960], [[]]) for k in range(3)], me=IDLE, you=IDLE)
    assert (choice.knows, choice.left) == (False, [])


def test_a_claim_looks_at_a_bounded_number_of_jobs() -> None:
    waiting = [Job(f"{k}", NOW, 40_960, [40_960], [["you"]]) for k in range(400)]
    big = IDLE.replace(f"{NOW} 4 4 ", f"{NOW} 1000 1000 ")
    choice = chosen(waiting, me=IDLE, you=big)
    assert choice.scanned <= 256
