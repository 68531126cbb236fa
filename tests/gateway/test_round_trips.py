"""The round trips to Redis that a request costs a gateway, and which of them its first event waits for."""

import json
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio.connection import AbstractConnection

from sluice.gateway import ServeSettings
from sluice.gateway.key_file import key_digest
from tests.fakes import FakeChat
from tests.gateway.gateways import HttpGateway, serving
from tests.waiting import until

PATH = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi."}], "say": ["1", " 2"], "stream": True}
KEYED = {"idempotency-key": "k"}

SUBMIT, LIMIT, SETTLE = ["EVALSHA"], ["EVALSHA"], ["EVALSHA"]  # only keys with limits settle
CLAIM, NOTE = ["SET"], ["SET"]
RETURN = ["HGETALL"]  # to a job whose client has left
STORED = ["HGET", "EXISTS", "STRLEN", "LLEN", "LRANGE"]
EVENTS = [["SUBSCRIBE"], ["LRANGE", "EXISTS"]]
END = [["UNSUBSCRIBE"]]

pytestmark = pytest.mark.usefixtures("fake_worker")


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of each round trip of a gateway, which runs in a thread of its own."""
    send, trips = AbstractConnection.send_packed_command, list[list[str]]()

    async def recorded(connection: Any, command: Any, *args: Any, **options: Any) -> None:
        sent = command if isinstance(command, bytes) else b"".join(command)
        names = re.findall(rb"\*\d+\r\n\$\d+\r\n([A-Z]+)\r\n", sent)
        is_new = names == [b"CLIENT"]  # a further connection introduces itself
        if threading.current_thread() is not threading.main_thread() and b"sluice:hub" not in sent and not is_new:
            trips.append([name.decode() for name in names])
        await send(connection, command, *args, **options)

    monkeypatch.setattr(AbstractConnection, "send_packed_command", recorded)
    return trips


@pytest.fixture
def gateway(redis_url: str, tmp_path: Path) -> Iterator[HttpGateway]:
    """A gateway that checks keys. It asks for a worker only after seconds."""
    keys = [
        {"id": "limited", "sha256": key_digest("limited"), "tenant": "a", "requests_per_minute": 1_000},
        {"id": "free", "sha256": key_digest("free"), "tenant": "a"},
    ]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": keys}))
    settings = ServeSettings(_env_file=None, keys=tmp_path / "keys.json", no_worker_s=40)
    with serving(redis_url, settings) as gateway:
        yield gateway


async def trips_of(
    http: httpx.AsyncClient,
    trips: list[list[str]],
    key: str,
    headers: dict[str, str],
    path: str = PATH,
    body: Mapping[str, Any] = BODY,
) -> Any:
    """Return the round trips of a request to a gateway that is warm."""
    for _ in range(2):  # connections are opened, and scripts loaded, with the first one
        await http.post(path, json=body, headers={"authorization": f"Bearer {key}"})
        await until(lambda: ["UNSUBSCRIBE"] in trips)
        trips.clear()
    answer = await http.post(path, json=body, headers={**headers, "authorization": f"Bearer {key}"})
    assert answer.status_code == 200
    await until(lambda: ["UNSUBSCRIBE"] in trips)
    return sorted(trips)


@pytest.mark.parametrize(
    ("key", "headers", "expected"),
    [
        ("free", {}, [RETURN, SUBMIT, *EVENTS, *END]),
        ("limited", {}, [RETURN, LIMIT, SUBMIT, *EVENTS, SETTLE, *END]),
        ("free", KEYED, [CLAIM, SUBMIT, NOTE, *EVENTS, *END]),
    ],
)
async def test_a_request_costs_few_round_trips(
    http: httpx.AsyncClient, trips: list[list[str]], key: str, headers: dict[str, str], expected: list[list[str]]
) -> None:
    assert await trips_of(http, trips, key, headers) == sorted(expected)


@pytest.mark.parametrize("store", [True, False])
async def test_a_response_is_stored_in_the_round_trip_that_queues_its_job(
    http: httpx.AsyncClient, trips: list[list[str]], store: bool
) -> None:
    body = {"input": "Hi.", "stream": True, "store": store}
    stored = [["EVALSHA"]] if store else []  # the response, once it has ended
    expected = sorted([RETURN, SUBMIT, *EVENTS, *stored, *END])
    assert await trips_of(http, trips, "free", {}, "/v1/responses", body) == expected


async def test_a_retry_reads_what_is_stored_in_one_round_trip(
    http: httpx.AsyncClient, trips: list[list[str]], chat: FakeChat
) -> None:
    first = await http.post(PATH, json=BODY, headers={**KEYED, "authorization": "Bearer free"})
    again = await trips_of(http, trips, "free", KEYED)
    assert again == sorted([CLAIM, STORED, *EVENTS, *END])
    assert first.headers["x-request-id"] in chat.began
