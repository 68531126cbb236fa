"""`/v1/files`, through OpenAI's SDK and through sockets that break off."""

import asyncio
import hashlib
import json
import random
import resource
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import openai as sdk
import pytest
from openai import AsyncOpenAI

from sluice.batch.store import FileStore
from sluice.gateway import ServeSettings
from sluice.gateway.key_file import KeyFile, edit, new_key
from tests.gateway.gateways import HttpGateway, gateway_process, serving
from tests.queue.helpers import until

LINE = b'{"custom_id": "a"}\n'


def on_disk(folder: Path) -> list[str]:
    """Return all files and folders of the store but its own."""
    return sorted(path.name for path in (folder / "files").glob("*/*"))


def form(data: bytes, *, purpose: str = "batch", boundary: str = "b0undary") -> bytes:
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n--{boundary}\r\n'
    file = 'Content-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    return f"{head}{file}".encode() + data + f"\r\n--{boundary}--\r\n".encode()


def request(body: bytes, *, path: str = "/v1/files") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    return f"{head}Content-Type: multipart/form-data; boundary=b0undary\r\n\r\n".encode() + body


async def test_a_file_is_uploaded_retrieved_and_deleted(openai: AsyncOpenAI, folder: Path) -> None:
    data = LINE * 50_000
    made = await openai.files.create(
        file=("in \u00e9.jsonl", data), purpose="batch", expires_after={"anchor": "created_at", "seconds": 7200}
    )
    assert (made.bytes, made.purpose, made.object, made.status) == (len(data), "batch", "file", "processed")
    assert (made.filename, made.expires_at) == ("in \u00e9.jsonl", made.created_at + 7200)
    assert made.to_dict()["sluice"] == {"sha256": hashlib.sha256(data).hexdigest()}
    assert await openai.files.retrieve(made.id) == made
    assert (await openai.files.content(made.id)).content == data
    assert (await openai.files.delete(made.id)).deleted
    with pytest.raises(sdk.NotFoundError):
        await openai.files.retrieve(made.id)
    assert on_disk(folder) == []


async def test_the_same_bytes_twice_are_two_files(openai: AsyncOpenAI) -> None:
    first, second = [await openai.files.create(file=("in.jsonl", LINE), purpose="batch") for _ in range(2)]
    await openai.files.delete(first.id)
    assert (await openai.files.content(second.id)).content == LINE


async def test_pages_have_each_file_once_in_both_orders(openai: AsyncOpenAI) -> None:
    made = [(await openai.files.create(file=(f"{n}", LINE), purpose="batch")).id for n in range(5)]
    for order, expected in (("asc", sorted(made)), ("desc", sorted(made, reverse=True))):
        assert [each.id async for each in openai.files.list(limit=2, order=order)] == expected  # type: ignore[arg-type]
    page = await openai.files.list(limit=2, after=sorted(made)[1], order="asc")
    assert ([each.id for each in page.data], page.has_more) == (sorted(made)[2:4], True)
    await openai.files.delete(sorted(made)[2])
    rest = await openai.files.list(after=sorted(made)[2], order="asc")
    assert [each.id for each in rest.data] == sorted(made)[3:], "the page after a file that was deleted"
    assert (await openai.files.list(purpose="batch_output")).data == []


async def test_content_has_ranges_and_conditions(openai: AsyncOpenAI, gateway: HttpGateway) -> None:
    made = await openai.files.create(file=("in.jsonl", b"0123456789"), purpose="batch")
    url = f"{gateway.base_url}/files/{made.id}/content"
    async with httpx.AsyncClient() as http:
        whole = await http.get(url)
        part = await http.get(url, headers={"range": "bytes=2-4"})
        rest = await http.get(url, headers={"range": "bytes=7-", "if-range": whole.headers["etag"]})
        none = await http.get(url, headers={"range": "bytes=99-"})
        same = await http.get(url, headers={"if-none-match": whole.headers["etag"]})
    assert (part.status_code, part.content, part.headers["content-range"]) == (206, b"234", "bytes 2-4/10")
    assert (rest.status_code, rest.content, none.status_code) == (206, b"789", 416)
    assert (same.status_code, same.content) == (304, b"")


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"expires_after": {"anchor": "created_at", "seconds": 60}}, "expires_after"),
        ({"expires_after": {"anchor": "last_used", "seconds": 7200}}, "expires_after"),
    ],
)
async def test_fields_that_are_wrong_are_named(
    openai: AsyncOpenAI, folder: Path, changed: dict[str, object], param: str
) -> None:
    with pytest.raises(sdk.BadRequestError) as refused:
        await openai.files.create(**{"file": ("in.jsonl", LINE), "purpose": "batch", **changed})  # type: ignore[arg-type]
    assert refused.value.param == param
    assert on_disk(folder) == []


@pytest.mark.parametrize(
    ("content_type", "body", "status"),
    [
        ("application/json", b"{}", 400),
        ("multipart/form-data", b"", 400),
        ("multipart/form-data; boundary=b0undary", b"", 400),
        ("multipart/form-data; boundary=b0undary", b"garbage", 400),
        ("multipart/form-data; boundary=b0undary", form(LINE)[:-4], 400),
        ("multipart/form-data; boundary=b0undary", form(LINE).replace(b'; filename="in.jsonl"', b""), 400),
        ("multipart/form-data; boundary=b0undary", form(LINE).replace(b"purpose", b"x" * 5_000), 400),
        ("multipart/form-data; boundary=b0undary", form(LINE, purpose="x" * 2_000), 400),
        ("multipart/form-data; boundary=b0undary", form(LINE)[:-16] + b"\r\n" + form(LINE), 400),
    ],
)
async def test_bodies_that_are_no_form_are_refused(
    gateway: HttpGateway, folder: Path, content_type: str, body: bytes, status: int
) -> None:
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{gateway.base_url}/files", content=body, headers={"content-type": content_type})
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")
    assert on_disk(folder) == []


async def test_a_file_name_is_text_and_no_path(openai: AsyncOpenAI, folder: Path) -> None:
    made = await openai.files.create(file=("../../x\x00\n" + "y" * 999, LINE), purpose="batch")
    assert made.filename.startswith("../../x")
    assert len(made.filename) == 255
    assert {path.name for path in folder.glob("files/*/*")} == {made.id}
    for wrong in ("x..", "..%2f..%2fetc", "file-" + "0" * 24, "about.json"):
        with pytest.raises(sdk.NotFoundError):
            await openai.files.content(wrong)


async def test_a_file_that_is_too_long_is_refused_before_it_is_sent(gateway: HttpGateway, folder: Path) -> None:
    head = request(b"").replace(b"Content-Length: 0", b"Content-Length: 300000000")
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(head)
    assert b" 413 " in await reader.readline()
    writer.close()
    assert on_disk(folder) == []


def send_part(gateway: HttpGateway, body: bytes, length: int) -> None:
    """Send the beginning of a request, and break off."""
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(request(body)[: -len(body)] + body[:length])


async def _cut_everywhere(openai: AsyncOpenAI, gateway: HttpGateway, folder: Path, data: bytes) -> None:
    body = form(data)
    for part in range(20):
        await asyncio.to_thread(send_part, gateway, body, len(body) * part // 20)

    async def is_clean() -> bool:
        return not (folder / "files").exists() or on_disk(folder) == []

    await until(is_clean)
    assert (await openai.files.list()).data == []


async def test_an_upload_that_is_cut_leaves_nothing(openai: AsyncOpenAI, gateway: HttpGateway, folder: Path) -> None:
    await _cut_everywhere(openai, gateway, folder, LINE * 100_000)


@pytest.mark.slow
async def test_a_large_upload_that_is_cut_leaves_nothing(
    openai: AsyncOpenAI, gateway: HttpGateway, folder: Path
) -> None:
    await _cut_everywhere(openai, gateway, folder, b"x" * 100_000_000)


async def test_a_full_disk_refuses_a_file_and_leaves_nothing(redis_url: str, folder: Path, tmp_path: Path) -> None:
    """The largest file of the gateway's process is limited, which the system reports as a full disk."""
    with gateway_process(redis_url, batch_dir=folder) as gateway:
        resource.prlimit(gateway.pid, resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
        async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as openai:
            with pytest.raises(sdk.InternalServerError) as refused:
                await openai.files.create(file=("in.jsonl", b"x" * 3_000_000), purpose="batch")
            assert (refused.value.status_code, refused.value.code) == (507, "storage_full")
            assert on_disk(folder) == []
            small = await openai.files.create(file=("in.jsonl", LINE), purpose="batch")
            assert [each.id async for each in openai.files.list()] == [small.id]


async def test_a_killed_gateway_leaves_nothing_after_the_next_start(redis_url: str, folder: Path) -> None:
    body = form(b"x" * 3_000_000)
    with gateway_process(redis_url, batch_dir=folder) as gateway:
        async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as openai:
            kept = await openai.files.create(file=("in.jsonl", LINE), purpose="batch")
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(request(body)[:2_000_000])

            async def is_written() -> bool:
                return len(on_disk(folder)) == 2

            await until(is_written)
            gateway.kill()
    with gateway_process(redis_url, batch_dir=folder) as gateway:
        async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as openai:
            assert [each.id async for each in openai.files.list()] == [kept.id]
    assert on_disk(folder) == [kept.id]


async def test_a_slow_upload_is_refused_and_leaves_nothing(redis_url: str, folder: Path) -> None:
    settings = ServeSettings(_env_file=None, batch_dir=folder, client_timeout_s=0.5)
    with serving(redis_url, settings) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        writer.write(request(form(LINE * 20_000))[:10_000])  # a second at the least speed

        async def is_begun() -> bool:
            return len(on_disk(folder)) == 1

        await until(is_begun)
        assert b" 408 " in await reader.readline()
        writer.close()
    assert on_disk(folder) == []


async def test_a_download_that_breaks_off_disturbs_nobody(openai: AsyncOpenAI, gateway: HttpGateway) -> None:
    made = await openai.files.create(file=("in.jsonl", b"x" * 5_000_000), purpose="batch")
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(f"GET /v1/files/{made.id}/content HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    await reader.readexactly(100_000)
    writer.transport.abort()
    assert len((await openai.files.content(made.id)).content) == 5_000_000


@pytest.mark.slow
async def test_kills_of_a_gateway_at_any_moment_leave_whole_files_and_whole_runs(redis_url: str, folder: Path) -> None:
    dice, data = random.Random(3), LINE * 200_000
    for _ in range(15):
        with gateway_process(redis_url, batch_dir=folder) as gateway:
            async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as openai:

                async def use(openai: AsyncOpenAI = openai) -> None:
                    while True:
                        file = await openai.files.create(file=("in.jsonl", data), purpose="batch")
                        await openai.batches.create(
                            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
                        )

                users = [asyncio.create_task(use()) for _ in range(3)]
                await asyncio.sleep(dice.uniform(0.1, 0.8))
                gateway.kill()
                await asyncio.gather(*users, return_exceptions=True)
    with gateway_process(redis_url, batch_dir=folder) as gateway:
        async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as openai:
            files = [each async for each in openai.files.list()]
            runs = [each async for each in openai.batches.list()]
    assert sorted(each.id for each in files) == on_disk(folder)
    assert len(files) > 15
    for file in files:
        stored = FileStore(folder).data(None, file.id).read_bytes()
        assert hashlib.sha256(stored).hexdigest() == file.to_dict()["sluice"]["sha256"]  # type: ignore[index]
    assert len(runs) > 5
    assert {f"{run.id}.jsonl" for run in runs} == {path.name for path in (folder / "inbox").glob("batch_*.jsonl")}
    assert all((folder / "inbox" / f"{run.id}.jsonl").read_bytes() == data for run in runs)


async def test_an_upload_of_a_living_process_is_not_swept(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    new = store.new("acme")
    new.write(LINE)
    store.sweep()
    stored = new.publish("in.jsonl", "batch", 7200)
    new.discard()
    store.sweep()
    assert store.find("acme", stored.id) == stored


async def test_a_file_beside_the_tenants_folders_disturbs_nobody(openai: AsyncOpenAI, folder: Path) -> None:
    file = await openai.files.create(file=("in.jsonl", LINE), purpose="batch")
    (folder / "files" / ".DS_Store").write_bytes(b"of macOS")
    FileStore(folder).sweep()
    assert [each.id async for each in openai.files.list()] == [file.id]


async def test_expired_files_are_gone_and_removed(openai: AsyncOpenAI, folder: Path) -> None:
    made = await openai.files.create(file=("in.jsonl", LINE), purpose="batch")
    (about,) = folder.glob("files/*/*/about.json")
    about.write_text(json.dumps(json.loads(about.read_text()) | {"expires_at": int(time.time())}))
    assert (await openai.files.list()).data == []
    with pytest.raises(sdk.NotFoundError):
        await openai.files.content(made.id)
    FileStore(folder).sweep()
    assert on_disk(folder) == []


async def test_without_a_folder_the_routes_tell_which_setting_is_missing(redis_url: str) -> None:
    with serving(redis_url, ServeSettings(_env_file=None)) as gateway:
        async with AsyncOpenAI(base_url=gateway.base_url, api_key="none", max_retries=0) as openai:
            for call in (openai.files.list, openai.batches.list):
                with pytest.raises(sdk.NotFoundError, match="SLUICE_SERVE_BATCH_DIR"):
                    await call()


@asynccontextmanager
async def tenants(
    redis_url: str, folder: Path, keys: Path, *fields: dict[str, object]
) -> AsyncIterator[list[AsyncOpenAI]]:
    """Serve with a key of these fields for each client."""
    made = [new_key(**each) for each in fields]
    edit(keys, lambda file: KeyFile(keys=tuple(key for _, key in made)))
    with serving(redis_url, ServeSettings(_env_file=None, batch_dir=folder, keys=keys)) as gateway:
        async with AsyncExitStack() as stack:
            clients = [AsyncOpenAI(base_url=gateway.base_url, api_key=secret, max_retries=0) for secret, _ in made]
            yield [await stack.enter_async_context(client) for client in clients]


async def test_a_tenant_has_its_own_files_and_its_own_limit(redis_url: str, folder: Path, tmp_path: Path) -> None:
    limits = ({"tenant": "acme", "batch_bytes": 1_000}, {"tenant": "other"})
    async with tenants(redis_url, folder, tmp_path / "keys.json", *limits) as (acme, other):
        large = await other.files.create(file=("in.jsonl", b"x" * 5_000), purpose="batch")
        own = await acme.files.create(file=("in.jsonl", b"x" * 600), purpose="batch")
        assert [each.id async for each in acme.files.list()] == [own.id]
        for call in (acme.files.retrieve, acme.files.content, acme.files.delete):
            with pytest.raises(sdk.NotFoundError):
                await call(large.id)
        with pytest.raises(sdk.PermissionDeniedError) as refused:
            await acme.files.create(file=("in.jsonl", b"x" * 600), purpose="batch")
        assert refused.value.code == "storage_exceeded"
        with pytest.raises(sdk.PermissionDeniedError):
            await acme.files.create(file=("in.jsonl", b"x" * 100_000), purpose="batch")
        await acme.files.delete(own.id)
        assert (await acme.files.create(file=("in.jsonl", b"x" * 600), purpose="batch")).bytes == 600


async def test_bytes_around_a_form_count_as_its_own(gateway: HttpGateway, folder: Path) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(2_000):
            yield b"\r\n" * 65_536

    headers = {"content-type": "multipart/form-data; boundary=b"}
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(f"{gateway.base_url}/files", content=endless(), headers=headers)
    assert answer.status_code == 413
    assert on_disk(folder) == []
