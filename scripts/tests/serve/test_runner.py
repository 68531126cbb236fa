"""All scenarios, with servers of known speed in this process."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from scripts.benchmarks.serve import trace
from scripts.benchmarks.serve.bare import Bare
from scripts.benchmarks.serve.driver import Reply, Request, Send, Unanswered
from scripts.benchmarks.serve.results import Outcome
from scripts.benchmarks.serve.runner import Runner
from scripts.benchmarks.serve.scenarios import SCENARIOS, Options
from scripts.benchmarks.serve.servers import Connect, Contender, NotServing
from scripts.benchmarks.serve.workload import LogNormal, Mix

BARE = Bare({1: 0.001, 32: 0.004}, {(1, 16): 0.0025, (1, 64): 0.01, (8, 16): 0.0128}, 10.0, 1.0)
SHORT = Mix(LogNormal(10, 0.5, 4, 40), LogNormal(4, 0.5, 2, 8), tenants=2)
TRACE = tuple(trace.parse([
    '{"at": 0, "prompt": "hi", "max_tokens": 2, "chat": "c"}',
    '{"at": 0.05, "prompt": "and", "max_tokens": 2, "chat": "c", "turn": 2}',
    '{"at": 0.05, "prompt_tokens": 30, "max_tokens": 3}',
]))  # fmt: skip
OPTIONS = Options(
    chats=(4,),
    agents=(2,),
    alone_words=(10,),
    loads=(0.5,),
    seconds=0.3,
    mix=SHORT,
    think_s=0.02,
    offline=1,
    trace=TRACE,
)


class Instant:
    """A server that answers at once, up to a number of requests at a time; more are refused."""

    def __init__(self, name: str, most: int = 1000, *, ours: bool = False) -> None:
        self.contender = Contender(name, self._serve, ours=ours)
        self.over_http = list[bool]()
        self.starts = 0
        self.requests = list[Request]()
        self._most = most
        self._running = 0

    @contextmanager
    def _serve(self, model: Path) -> Iterator[Connect]:
        self.starts += 1
        yield self._connect

    @asynccontextmanager
    async def _connect(self, over_http: bool) -> AsyncIterator[Send]:
        self.over_http.append(over_http)
        yield self._send

    async def _send(self, request: Request) -> Reply:
        if self._running >= self._most:
            raise Unanswered("no room")
        self._running += 1
        self.requests.append(request)
        await asyncio.sleep(0.005)
        self._running -= 1
        return Reply((time.perf_counter(),), "word", request.max_tokens, 20)

    def prompts(self) -> list[str]:
        return [request.messages[0]["content"] for request in self.requests]


async def measured(*servers: Instant, scenarios: list[str], runs: int = 1, options: Options = OPTIONS) -> list[Outcome]:
    runner = Runner(options, scenarios, BARE, Path(), "seed", 5.0, lambda text: None, settle_s=0)
    return [outcome async for outcome in runner.run([server.contender for server in servers], runs)]


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_every_scenario_is_measured(scenario: str) -> None:
    outcomes = await measured(Instant("a"), scenarios=[scenario])
    assert {(outcome.server, outcome.scenario) for outcome in outcomes} == {("a", scenario)}
    for outcome in outcomes:
        assert outcome.figures.failed == 0
        assert outcome.figures.of_bare > 0


async def test_all_servers_get_the_same_chats_and_no_run_repeats_them() -> None:
    first, second = Instant("a"), Instant("b")
    await measured(first, second, scenarios=["burst", "prompts"], runs=2)
    assert sorted(first.prompts()) == sorted(second.prompts())
    assert len({*first.prompts()}) == len(first.prompts())


async def test_each_run_starts_each_server_in_alternating_order() -> None:
    servers = Instant("a"), Instant("b")
    outcomes = await measured(*servers, scenarios=["burst"], runs=3)
    assert [outcome.server for outcome in outcomes] == ["a", "b", "b", "a", "a", "b"]
    assert [server.starts for server in servers] == [3, 3]


async def test_offline_chats_run_beside_open_arrival_alone() -> None:
    server = Instant("a")
    [burst] = await measured(server, scenarios=["burst"])
    assert {request.lane for request in server.requests} == {"interactive"}
    [outcome] = await measured(server, scenarios=["open"])
    assert {request.lane for request in server.requests} == {"interactive", "batch"}
    assert outcome.figures.offline_tokens_per_s > 0 == burst.figures.offline_tokens_per_s


async def test_agents_are_measured_over_http_and_other_servers_without_reminders() -> None:
    ours, peer = Instant("a", ours=True), Instant("b")
    outcomes = await measured(ours, peer, scenarios=["burst", "agents"])
    cases = {each.name: [it.case for it in outcomes if (it.server, it.scenario) == (each.name, "agents")]
             for each in (ours.contender, peer.contender)}  # fmt: skip
    assert cases == {"a": ["2 at once", "2 at once with reminders"], "b": ["2 at once"]}
    assert ours.over_http == peer.over_http == [False, True]


async def test_an_agents_turn_is_sent_with_its_tools_and_its_reminder_behind_the_users_message() -> None:
    server = Instant("a", ours=True)
    await measured(server, scenarios=["agents"])
    longest = [request for request in server.requests if len(request.messages) == 18]
    roles = ["system", *["user", "system", "assistant"] * 5, "user", "system"]
    assert [[each["role"] for each in request.messages] for request in longest] == [roles] * 2
    assert len(longest[0].body()["tools"]) == 3


async def test_the_highest_rate_is_one_that_was_good() -> None:
    [outcome] = await measured(Instant("a"), scenarios=["highest"])
    assert outcome.rate is not None
    assert outcome.rate > 0
    assert outcome.figures.good >= 0.9


async def test_refused_turns_are_counted_with_the_first_reason() -> None:
    [outcome] = await measured(Instant("a", most=2), scenarios=["burst"])
    assert (outcome.figures.requests, outcome.figures.failed, outcome.error) == (4, 2, "no room")


async def test_a_server_that_refuses_the_first_chat_is_not_measured() -> None:
    with pytest.raises(NotServing, match="a: refuses a first chat: no room"):
        await measured(Instant("a", most=0), scenarios=["burst"])
