"""Bodies that clients send encoded: decoded within the limits of the body, or refused."""

import asyncio
import gzip
import json
import time
import zlib
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from starlette.requests import Request

from sluice.gateway import ServeSettings
from sluice.gateway.body import receive_body, zstd
from sluice.gateway.protection import Memory
from sluice.interfaces.errors import ApiError
from tests.gateway.gateways import serving

PATH = "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "Hi."}], "say": ["a"]}
PLAIN = json.dumps(CHAT).encode()
LIMIT = 2_000_000
LONG = json.dumps({"text": "".join(map(str, range(200_000)))}).encode()  # more than one part in each encoding


def request(body: bytes, encoding: str) -> Request:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-encoding", encoding.encode()), (b"content-length", str(len(body)).encode())]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)


ENCODE: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZip": gzip.compress,
    "zstd": zstd.compress,
    "identity": bytes,
}


@pytest.mark.parametrize("encoding", ENCODE)
async def test_an_encoded_body_is_that_which_was_encoded_and_is_held_as_it_is_decoded(encoding: str) -> None:
    memory = Memory(2 * LIMIT, LIMIT)
    held = memory.hold(None)
    plain = await receive_body(request(LONG, ""), LIMIT, memory.hold(None))
    before = memory.total
    body = await receive_body(request(ENCODE[encoding](LONG), encoding), LIMIT, held)
    assert (body.content, body.length, body.digest) == (json.loads(LONG), len(LONG), plain.digest)
    assert memory.total - before == len(LONG)


def _with_window(log: int) -> bytes:
    """Return a small body whose decoder would need a window of 2 ** `log` bytes."""
    parameters = zstd.CompressionParameter
    encoder = zstd.ZstdCompressor(options={parameters.window_log: log, parameters.content_size_flag: 0})
    return encoder.compress(PLAIN) + encoder.flush()


@pytest.mark.parametrize(
    ("encoding", "body", "status", "code"),
    [
        ("br", PLAIN, 415, "unsupported"),
        ("gzip, zstd", PLAIN, 415, "unsupported"),
        ("gzip", PLAIN, 400, "invalid_value"),
        ("gzip", gzip.compress(PLAIN)[:-9], 400, "invalid_value"),
        ("gzip", gzip.compress(PLAIN) * 2, 400, "invalid_value"),
        ("gzip", zlib.compress(PLAIN), 400, "invalid_value"),
        ("gzip", b"", 400, "invalid_value"),
        ("zstd", PLAIN, 400, "invalid_value"),
        ("zstd", zstd.compress(PLAIN)[:-1], 400, "invalid_value"),
        ("zstd", zstd.compress(PLAIN) + b"{}", 400, "invalid_value"),
        ("zstd", _with_window(27), 400, "invalid_value"),
        ("gzip", gzip.compress(b" " * (LIMIT + 1)), 413, "too_large"),
        ("zstd", zstd.compress(b" " * (LIMIT + 1)), 413, "too_large"),
        ("gzip", gzip.compress(b"[" + b"1," * 200_000), 413, "too_large"),
    ],
    ids=lambda value: f"{len(value)} bytes" if isinstance(value, bytes) else None,  # gzip writes the time
)
async def test_what_cannot_be_decoded_within_the_limits_is_refused(
    encoding: str, body: bytes, status: int, code: str
) -> None:
    with pytest.raises(ApiError) as refused:
        await receive_body(request(body, encoding), LIMIT, Memory(2 * LIMIT, LIMIT).hold(None))
    assert (refused.value.form.status, refused.value.form.code) == (status, code)


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
async def test_a_body_that_grows_without_end_is_refused_long_before_its_end(encoding: str) -> None:
    """What is held tells how much was decoded: no more than the gateway may hold, of a body a hundred times as long."""
    memory = Memory(3_000_000, LIMIT)
    held = memory.hold(None)
    bomb = ENCODE[encoding](b" " * 300_000_000)
    with pytest.raises(ApiError) as refused:
        await receive_body(request(bomb, encoding), 100_000_000, held)
    assert (refused.value.form.status, refused.value.form.code, memory.total <= 3_000_000) == (503, "overloaded", True)


@pytest.mark.timing
async def test_decoding_a_long_body_does_not_stop_the_event_loop() -> None:
    bomb = gzip.compress(b" " * 100_000_000)
    longest, last = 0.0, time.monotonic()
    done = False

    async def watch() -> None:
        nonlocal longest, last
        while not done:
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    with pytest.raises(ApiError):
        await receive_body(request(bomb, "gzip"), 90_000_000, Memory(10**9, 10**9).hold(None))
    done = True
    await watching
    assert longest < 0.05


@pytest.fixture
async def http(redis_url: str) -> AsyncIterator[httpx.AsyncClient]:
    with serving(redis_url, ServeSettings(_env_file=None, max_body_bytes=10_000, max_held_bytes=50_000)) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
            yield client


@pytest.mark.usefixtures("fake_worker")
async def test_each_interface_takes_encoded_bodies_and_refuses_others_with_a_sentence(http: httpx.AsyncClient) -> None:
    question = {"model": "default", "max_tokens": 9, **CHAT}
    bodies = {
        PATH: CHAT,
        "/v1/messages": {name: question[name] for name in ("model", "max_tokens", "messages")},
        "/v1/responses": {"input": "Hi."},
    }
    for path, body in bodies.items():
        plain = json.dumps(body).encode()
        for encoding, encoded in (("gzip", gzip.compress(plain)), ("zstd", zstd.compress(plain))):
            answer = await http.post(path, content=encoded, headers={"content-encoding": encoding})
            assert (path, encoding, answer.status_code) == (path, encoding, 200)
        refused = await http.post(path, content=plain, headers={"content-encoding": "br"})
        assert (path, refused.status_code) == (path, 415)
        assert "gzip, zstd" in refused.json()["error"]["message"]
        bomb = await http.post(path, content=gzip.compress(b" " * 5_000_000), headers={"content-encoding": "gzip"})
        assert (path, bomb.status_code) == (path, 413)


@pytest.mark.usefixtures("fake_worker")
async def test_a_retry_in_another_encoding_joins_its_job(http: httpx.AsyncClient) -> None:
    ids = set[str]()
    for encoding, content in (("gzip", gzip.compress(PLAIN)), ("zstd", zstd.compress(PLAIN)), ("identity", PLAIN)):
        headers = {"content-encoding": encoding, "idempotency-key": "k"}
        answer = await http.post(PATH, content=content, headers=headers)
        assert answer.status_code == 200
        ids.add(answer.headers["x-request-id"])
    assert len(ids) == 1
