import asyncio
import socket
import threading
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import pytest
from httpcore2 import AsyncMockBackend, AsyncNetworkBackend
from hypothesis import given
from hypothesis import strategies as st

from sluice.network import HEAD_BYTES
from tests.images.internet import (
    ADDRESS,
    ANOTHER,
    Internet,
    Page,
    answer,
    certified,
    fetched,
    leads_to,
    trusting,
)
from worker.errors import JobFailure
from worker.images.fetch import Fetcher

FILE = bytes(range(256))
CUT_OFF = ("invalid_request", "the server's answer is truncated or not valid HTTP.")
TOO_LONG = ("too_large", "the image's file is longer than this worker accepts (1,000 bytes).")
NOT_PUBLIC = ("invalid_request", "the URL leads to an address that is not public.")


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


WAYS = {
    "with its length": answer(FILE, "Content-Length: 256"),
    "with its length, and more behind it": answer(FILE + b"more", "Content-Length: 256"),
    "in chunks": answer(chunked(FILE[:100], FILE[100:]), "Transfer-Encoding: chunked"),
    "in chunks with extensions and a trailer": answer(
        b"100;a=b\r\n" + FILE + b"\r\n0\r\nX: y\r\n\r\n", "Transfer-Encoding: Chunked"
    ),
    "to the end": answer(FILE),
    "as HTTP 1.0": b"HTTP/1.0 200 OK\r\n\r\n" + FILE,
    "without a reason": b"HTTP/1.1 200\r\nContent-Length: 256\r\n\r\n" + FILE,
    "after early hints": answer(b"", status="103 Early Hints") + answer(FILE, "Content-Length: 256"),
    "as it is, by its word": answer(FILE, "Content-Encoding: identity"),
    "with its length written twice": answer(FILE, "Content-Length: 256, 256", "Content-Length: 256"),
    "in chunks that count": answer(chunked(FILE), "Transfer-Encoding: chunked", "Content-Length: 7"),
    "as HTTP 1.0, kept alive": b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 256\r\n\r\n" + FILE,
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_file_comes_in_every_way_that_http_has(way: str) -> None:
    assert await fetched(WAYS[way]) == FILE


async def test_a_file_may_be_as_long_as_is_allowed() -> None:
    file = b"x" * 1000
    assert await fetched(answer(file, "Content-Length: 1000")) == file
    assert await fetched(answer(chunked(file[:1], file[1:]), "Transfer-Encoding: chunked")) == file
    assert await fetched(answer(file)) == file


async def endless(writer: StreamWriter, parts: Iterable[bytes]) -> None:
    for part in parts:
        writer.write(part)
        await writer.drain()


def forever(part: bytes) -> Iterable[bytes]:
    while True:
        yield part


async def endless_body(writer: StreamWriter) -> None:
    writer.write(answer(b""))
    await endless(writer, forever(b"x" * 10_000))


async def endless_chunks(writer: StreamWriter) -> None:
    writer.write(answer(b"", "Transfer-Encoding: chunked"))
    await endless(writer, forever(b"64\r\n" + b"x" * 100 + b"\r\n"))


async def endless_chunk(writer: StreamWriter) -> None:
    writer.write(answer(b"ffffffff\r\n", "Transfer-Encoding: chunked"))
    await endless(writer, forever(b"x" * 10_000))


async def endless_length(writer: StreamWriter) -> None:
    writer.write(answer(b"", "Content-Length: 999999999999"))
    await endless(writer, forever(b"x" * 10_000))


@pytest.mark.parametrize("page", [endless_body, endless_chunks, endless_chunk, endless_length])
async def test_an_endless_file_is_refused_for_its_length(page: Page) -> None:
    assert await fetched(page) == TOO_LONG


async def endless_headers(writer: StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    await endless(writer, forever(b"X: y\r\n" * 1000))


async def endless_line(writer: StreamWriter) -> None:
    await endless(writer, forever(b"HTTP/1.1 200 OK" * 1000))


async def endless_hints(writer: StreamWriter) -> None:
    await endless(writer, forever(answer(b"", status="103 Early Hints") * 100))


async def endless_extension(writer: StreamWriter) -> None:
    writer.write(answer(b"3;", "Transfer-Encoding: chunked"))
    await endless(writer, forever(b"x" * 10_000))


async def endless_trailers(writer: StreamWriter) -> None:
    writer.write(answer(b"3\r\nxyz\r\n0\r\n", "Transfer-Encoding: chunked"))
    await endless(writer, forever(b"X: y\r\n" * 1000))


NO_HTTP: dict[str, Page] = {
    "nothing": b"",
    "not HTTP": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "a picture at once": b"\x89PNG\r\n\x1a\n\r\n\r\n",
    "headers that end early": b"HTTP/1.1 200 OK\r\nContent-Le",
    "endless headers": endless_headers,
    "an endless line": endless_line,
    "longer headers than any server sends": answer(FILE, f"X: {'y' * HEAD_BYTES}"),
    "less than its length": answer(FILE, "Content-Length: 257"),
    "a length below zero": answer(FILE, "Content-Length: -1"),
    "a length in words": answer(FILE, "Content-Length: many"),
    "two lengths in one": answer(FILE, "Content-Length: 256, 257"),
    "two lengths": answer(FILE, "Content-Length: 256", "Content-Length: 257"),
    "a length of Python's own": answer(FILE, "Content-Length: 2_56"),
    "a length of thirty digits": answer(FILE, f"Content-Length: {'9' * 30}"),
    "a chunk that is cut off": answer(b"100\r\nxyz", "Transfer-Encoding: chunked"),
    "chunks without an end": answer(b"3\r\nxyz\r\n", "Transfer-Encoding: chunked"),
    "a chunk that is longer than it says": answer(b"3\r\nwxyz\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
    "a chunk of unknown length": answer(b"-3\r\nxyz\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
    "a chunk of Python's own length": answer(b"0_3\r\nxyz\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
    "a chunk of thirty digits": answer(b"f" * 30 + b"\r\nxyz", "Transfer-Encoding: chunked"),
    "an endless line before a chunk": endless_extension,
    "endless trailers": endless_trailers,
    "a transfer that nobody asked for": answer(FILE, "Transfer-Encoding: gzip, chunked"),
    "endless hints": endless_hints,
    "a status of four digits": b"HTTP/1.1 2000 OK\r\n\r\n",
    "another protocol, which nobody asked for": answer(FILE, "Upgrade: x", status="101 Switching Protocols"),
}


@pytest.mark.parametrize("kind", NO_HTTP)
async def test_what_is_no_whole_answer_is_refused(kind: str) -> None:
    assert await fetched(NO_HTTP[kind]) == CUT_OFF


@pytest.mark.parametrize(
    ("status", "retryable"),
    [("404 Not Found", False), ("403 Forbidden", False), ("204 No Content", False), ("304 Not Modified", False)]
    + [("206 Partial Content", False), ("302 Found", False)]
    + [("429 Too Many Requests", True), ("503 Service Unavailable", True)],
)
@pytest.mark.parametrize("body", [b"", FILE], ids=["alone", "with a body"])
async def test_an_answer_without_a_file_is_told_by_its_number(status: str, retryable: bool, body: bytes) -> None:
    internet = Internet({"/": answer(body, f"Content-Length: {len(body)}", status=status)})
    said = await internet.fetch("http://pictures.example")
    assert (said, internet.retryable) == (("invalid_request", f"the server answered {status[:3]}."), retryable)


async def test_a_compressed_answer_is_refused() -> None:
    said = "the server sent the image compressed, although the request ruled that out."
    assert await fetched(answer(FILE, "Content-Encoding: gzip")) == ("invalid_request", said)


UNUSED = trusting()  # reading all certificates of the machine takes 20 ms


@st.composite
def broken_answers(draw: st.DrawFn) -> bytes:
    said = bytearray(draw(st.sampled_from(sorted(WAYS.values()))))
    for at, value in draw(st.lists(st.tuples(st.integers(0, len(said) - 1), st.integers(0, 255)), max_size=4)):
        said[at] = value
    return bytes(said[: draw(st.integers(0, len(said)))])


@given(broken_answers() | st.binary())
async def test_whatever_a_server_says_is_a_file_a_redirect_or_refused(said: bytes) -> None:
    with suppress(JobFailure):
        fetcher = Fetcher(1000, resolve=Internet({}).resolve, network=AsyncMockBackend([said]), tls=UNUSED)
        assert len(await fetcher.fetch("http://pictures.example/")) <= 1000


async def tiny_chunks(writer: StreamWriter) -> None:
    writer.write(answer(b"", "Transfer-Encoding: chunked"))
    await endless(writer, forever(b"1\r\nx\r\n" * 10_000))


@pytest.mark.parametrize("page", [endless_headers, endless_hints, endless_trailers, tiny_chunks])
async def test_what_a_server_sends_takes_the_event_loop_a_moment_at_a_time(page: Page) -> None:
    fetching = asyncio.ensure_future(fetched(page, max_bytes=20_000))
    longest_s, last = 0.0, time.thread_time()  # of this thread alone: the machine may be busy
    while not fetching.done():
        await asyncio.sleep(0)
        longest_s, last = max(longest_s, time.thread_time() - last), time.thread_time()
    await fetching
    assert longest_s < 0.06, "httpcore alone parses 100 kB at once, which takes 0.04 s and more"


async def silent(writer: StreamWriter) -> None:
    await asyncio.sleep(5)


async def slow_headers(writer: StreamWriter) -> None:
    for letter in b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000:
        writer.write(bytes([letter]))
        await writer.drain()
        await asyncio.sleep(0.01)


async def slow_body(writer: StreamWriter) -> None:
    writer.write(answer(b"", "Content-Length: 1000"))
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


@pytest.mark.timing
@pytest.mark.parametrize("page", [silent, slow_headers, slow_body])
async def test_a_slow_server_is_given_up_after_the_time_for_all_of_it(page: Page) -> None:
    began = asyncio.get_running_loop().time()
    assert await fetched(page, seconds=0.2) == ("invalid_request", "the image did not arrive within 0.2 s.")
    assert asyncio.get_running_loop().time() - began < 2


async def test_a_redirect_is_followed_up_to_three_times() -> None:
    pages: dict[str, Page] = {
        "/0": leads_to("/1"),
        "/1": leads_to("http://other.example/2?a=b#here"),
        "/2?a=b": leads_to("//third.example/3"),
        "/3": answer(FILE),
        "/loop": leads_to("/loop"),
    }
    internet = Internet(pages)
    assert await internet.fetch("http://pictures.example/0") == FILE
    assert internet.looked_up == ["pictures.example", "pictures.example", "other.example", "third.example"]
    said = "the URL redirects more than 3 times."
    assert await internet.fetch("http://pictures.example/loop") == ("invalid_request", said)
    assert len(internet.asked) == 8


async def test_all_redirects_share_one_time() -> None:
    async def later(writer: StreamWriter) -> None:
        await asyncio.sleep(0.15)
        writer.write(leads_to("/a.png"))

    assert await fetched(later, seconds=0.3) == ("invalid_request", "the image did not arrive within 0.3 s.")


INSIDE = ["127.0.0.1", "::1", "10.0.0.7", "169.254.169.254", "::ffff:127.0.0.1", "fe80::1%eth0", "0.0.0.0"]


@pytest.mark.parametrize("address", INSIDE)
async def test_a_name_of_an_address_that_is_not_public_is_refused(address: str) -> None:
    internet = Internet({"/a.png": answer(FILE)})
    internet.names["inside.example"] = [[address]]
    assert await internet.fetch("http://inside.example/a.png") == NOT_PUBLIC
    assert internet.connected == []


async def test_a_name_with_one_address_that_is_not_public_is_refused() -> None:
    internet = Internet({"/a.png": answer(FILE)})
    internet.names["both.example"] = [[ADDRESS, "127.0.0.1"]]
    assert await internet.fetch("http://both.example/a.png") == NOT_PUBLIC
    assert internet.connected == []


LOCATIONS = """
http://127.0.0.1:6379/ http://inside.example/ //[::1]/ http://0x7f.1/ http://[::ffff:127.0.0.1]/ https://127.0.0.1/
http://169.254.169.254/latest/meta-data/
""".split()


@pytest.mark.parametrize("location", LOCATIONS)
async def test_a_redirect_to_an_address_that_is_not_public_is_refused(location: str) -> None:
    internet = Internet({"/a.png": leads_to(location)})
    internet.names |= {name: [["127.0.0.1"]] for name in ("127.0.0.1", "inside.example", "::1", "0x7f.1")}
    internet.names |= {name: [[name]] for name in ("169.254.169.254", "::ffff:7f00:1", "::ffff:127.0.0.1")}
    assert await internet.fetch("http://pictures.example/a.png") == NOT_PUBLIC
    assert internet.connected == [ADDRESS]


@pytest.mark.parametrize("location", ["http://[", "http://a b/", "//a..b/"])
async def test_a_redirect_that_is_no_url_is_refused(location: str) -> None:
    refused = await fetched(leads_to(location))
    assert refused[0] == "invalid_request"


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://pictures.example/a.png", "data:image/png,x"])
async def test_a_redirect_to_something_else_is_refused(location: str) -> None:
    said = "the URL must begin with https:, http: or data:."
    assert await fetched(leads_to(location)) == ("invalid_request", said)


async def test_the_address_that_was_looked_at_is_the_one_that_is_connected_to() -> None:
    """A name may mean something else a moment later."""
    internet = Internet({"/a.png": answer(FILE)})
    internet.names["turning.example"] = [[ADDRESS], ["127.0.0.1"]]
    assert await internet.fetch("http://turning.example/a.png") == FILE
    assert (internet.looked_up, internet.connected) == (["turning.example"], [ADDRESS])


async def test_a_name_is_looked_at_again_with_each_redirect() -> None:
    internet = Internet({"/a.png": leads_to("/a.png")})
    internet.names["turning.example"] = [[ADDRESS], ["127.0.0.1"]]
    assert await internet.fetch("http://turning.example/a.png") == NOT_PUBLIC
    assert internet.connected == [ADDRESS]


SPELLINGS = """
127.0.0.1 localhost 127.1 2130706433 0x7f000001 0177.0.0.1 0.0.0.0 0 [::1] [::] [::ffff:127.0.0.1] [::ffff:7f00:1]
LOCALHOST 127.0.0.1. 169.254.169.254 10.0.0.1 [fe80::1] [64:ff9b::7f00:1] ①②⑦.⓪.⓪.①
""".split()


class NoConnection(AsyncNetworkBackend):
    async def connect_tcp(self, *_: object, **__: object) -> Any:
        raise AssertionError("it was connected to")


@pytest.mark.parametrize("host", SPELLINGS)
async def test_this_machine_and_its_network_are_refused_however_they_are_written(host: str) -> None:
    with pytest.raises(JobFailure) as raised:
        await Fetcher(1000, network=NoConnection()).fetch(f"http://{host}:80/a.png")
    # Not every system's resolver takes every spelling.
    assert (raised.value.type, raised.value.message) in (
        NOT_PUBLIC, ("invalid_request", "the server cannot be reached."),
    )  # fmt: skip


async def test_a_server_of_this_machine_is_not_asked() -> None:
    internet = Internet({"/a.png": answer(FILE)})
    async with internet.on():
        with pytest.raises(JobFailure, match="not public"):
            await Fetcher(1000).fetch(f"http://127.0.0.1:{internet.port}/a.png")
    assert internet.asked == []


async def test_the_next_address_is_tried_where_one_does_not_answer() -> None:
    internet = Internet({"/a.png": answer(FILE)})
    internet.names["two.example"] = [[ANOTHER, ADDRESS]]
    internet.dead = {ANOTHER}
    assert await internet.fetch("http://two.example/a.png") == FILE
    assert internet.connected == [ANOTHER, ADDRESS]


async def test_names_that_take_long_keep_no_thread_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    looking, go_on = list[str](), threading.Event()

    def silent(host: str, port: int, **how: object) -> list[object]:
        looking.append(host)
        go_on.wait(10)
        return []

    monkeypatch.setattr("sluice.network.getaddrinfo", silent)
    fetcher = Fetcher(1000, seconds=0.5)
    names = [f"http://{number}.example/" for number in range(64)]
    fetching = asyncio.gather(*map(fetcher.fetch, names), return_exceptions=True)
    while not looking:
        await asyncio.sleep(0.001)
    async with asyncio.timeout(5):
        assert await asyncio.to_thread(lambda: "here") == "here"
    assert {str(refusal) for refusal in await fetching} == {"the image did not arrive within 0.5 s."}
    assert len(looking) < len(names)
    go_on.set()
    fetcher.close()


async def test_a_server_that_cannot_be_reached_may_be_later() -> None:
    internet = Internet({})
    internet.dead = {ADDRESS}
    assert await internet.fetch("http://pictures.example/") == ("invalid_request", "the server cannot be reached.")
    assert internet.retryable


async def test_the_request_is_that_of_a_plain_get() -> None:
    internet = Internet({"/a%20b/%C3%A4.png?x=%22y%22&z=1%202": answer(FILE)})
    assert await internet.fetch('HTTP://Pictures.example:8080/a b/ä.png?x="y"&z=1%202#top') == FILE
    lines = internet.asked[0].split("\r\n")
    assert lines[:2] == ["GET /a%20b/%C3%A4.png?x=%22y%22&z=1%202 HTTP/1.1", "Host: pictures.example:8080"]
    assert {line.split(":")[0] for line in lines[2:-2]} == {"User-Agent", "Accept", "Accept-Encoding", "Connection"}


async def test_the_answer_of_a_redirect_changes_nothing_but_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    to_the_next = answer(b"", "Location: /b.png", "Set-Cookie: a=b", "Content-Length: 0", status="302 Found")
    internet = Internet({"/a.png": to_the_next, "/b.png": answer(FILE)})
    assert await internet.fetch("http://pictures.example/a.png") == FILE
    first, second = internet.asked
    assert second == first.replace("/a.png", "/b.png")
    assert internet.connected == [ADDRESS, ADDRESS]


async def test_a_connection_serves_one_request_even_if_the_server_keeps_it() -> None:
    """Another host at the same address may not be asked on it either."""

    async def kept(writer: StreamWriter) -> None:
        writer.write(answer(FILE, "Content-Length: 256", "Connection: keep-alive"))
        await writer.drain()
        await asyncio.sleep(1)

    internet = Internet({"/a.png": kept})
    fetcher = internet.fetcher()
    async with internet.on():
        for url in ("http://pictures.example/a.png", "http://pictures.example/a.png", "http://other.example/a.png"):
            assert await fetcher.fetch(url) == FILE
    assert (len(internet.asked), len(internet.connected)) == (3, 3)


async def test_https_wants_a_certificate_for_the_host() -> None:
    internet = Internet({"/a.png": answer(FILE)})
    refused = ("invalid_request", "the server's certificate is not valid for this host.")
    for host, expected in (("pictures.example", FILE), (ADDRESS, FILE), ("other.example", refused), (ANOTHER, refused)):
        assert await internet.fetch(f"https://{host}/a.png", tls=certified(), trusted=trusting()) == expected
    assert not internet.retryable
    assert await internet.fetch("https://pictures.example/a.png", tls=certified()) == refused, "nobody signed it"


async def test_a_server_without_tls_cannot_be_reached_by_https() -> None:
    internet = Internet({"/a.png": answer(FILE)})
    assert await internet.fetch("https://pictures.example/a.png", seconds=0.3) in (
        ("invalid_request", "the server cannot be reached."),
        ("invalid_request", "the image did not arrive within 0.3 s."),
    )


class Mute(Internet):
    """Accepts connections, and notes when they are closed."""

    def __init__(self) -> None:
        super().__init__({})
        self.closed = asyncio.Event()

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        with suppress(ConnectionError):
            while await reader.read(1000):
                pass
        self.closed.set()
        writer.close()


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_connection_is_closed_when_the_time_is_up(scheme: str) -> None:
    internet = Mute()
    async with internet.on():
        with pytest.raises(JobFailure, match=r"did not arrive within 0\.2 s"):
            await internet.fetcher(seconds=0.2).fetch(f"{scheme}://pictures.example/a.png")
        async with asyncio.timeout(5):
            await internet.closed.wait()


async def test_a_name_that_does_not_exist_may_exist_later() -> None:
    async def unknown(host: str, port: int) -> list[str]:
        raise socket.gaierror

    with pytest.raises(JobFailure) as raised:
        await Fetcher(1000, resolve=unknown).fetch("http://nobody.example/")
    assert (raised.value.type, raised.value.retryable) == ("invalid_request", True)
