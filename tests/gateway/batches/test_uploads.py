"""`/v1/uploads`, through OpenAI's SDK: parts become one file, whole or not at all."""

import asyncio
import hashlib
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai as sdk
import pytest
from openai import AsyncOpenAI
from openai.types import Upload as SdkUpload

from sluice.batch import store
from sluice.batch.store import FileStore, NewFile, StoredFile, Upload
from tests.gateway.batches.test_files import LINE, form, on_disk, request, tenants
from tests.gateway.gateways import HttpGateway
from tests.queue.helpers import until


async def created(openai: AsyncOpenAI, length: int) -> SdkUpload:
    return await openai.uploads.create(bytes=length, filename="in.jsonl", mime_type="text/jsonl", purpose="batch")


async def added(openai: AsyncOpenAI, upload: SdkUpload, *parts: bytes) -> list[str]:
    """Send the parts side by side, and return their ids."""
    sent = await asyncio.gather(*(openai.uploads.parts.create(upload.id, data=part) for part in parts))
    return [part.id for part in sent]


async def test_parts_become_one_file_in_the_order_of_their_ids(openai: AsyncOpenAI, folder: Path) -> None:
    upload = await created(openai, 12)
    assert (upload.status, upload.bytes, upload.file) == ("pending", 12, None)
    assert upload.expires_at == upload.created_at + 3600
    last, first, unused = await added(openai, upload, b"last12", b"first0", b"unused")
    done = await openai.uploads.complete(
        upload.id, part_ids=[first, last], md5=hashlib.md5(b"first0last12").hexdigest().upper()
    )
    assert (done.status, done.id, unused in (first, last)) == ("completed", upload.id, False)
    assert done.file is not None
    assert (await openai.files.content(done.file.id)).content == b"first0last12"
    assert await openai.files.retrieve(done.file.id) == done.file
    assert (done.file.filename, done.file.bytes, done.file.purpose) == ("in.jsonl", 12, "batch")
    assert on_disk(folder) == sorted([done.file.id, upload.id]), "the parts are gone"


async def test_the_sdk_uploads_a_file_in_chunks(openai: AsyncOpenAI, tmp_path: Path) -> None:
    data = random.Random(5).randbytes(3_000_001)
    (tmp_path / "in.jsonl").write_bytes(data)
    done = await openai.uploads.upload_file_chunked(
        file=tmp_path / "in.jsonl", mime_type="text/jsonl", purpose="batch", part_size=700_000
    )
    assert done.file is not None
    assert (await openai.files.content(done.file.id)).content == data
    empty = await openai.uploads.upload_file_chunked(
        file=b"", filename="empty", bytes=0, mime_type="text/jsonl", purpose="batch"
    )
    assert empty.file is not None
    assert empty.file.bytes == 0


async def test_a_completion_that_is_sent_again_finds_its_file(openai: AsyncOpenAI, folder: Path) -> None:
    upload = await created(openai, len(LINE))
    part_ids = await added(openai, upload, LINE)
    first = await openai.uploads.complete(upload.id, part_ids=part_ids)
    assert await openai.uploads.complete(upload.id, part_ids=part_ids) == first
    stored = FileStore(folder).find_upload(None, upload.id)
    assert stored is not None
    replace(stored, status="pending").save()  # as a gateway that died after the file was there has left it
    assert await openai.uploads.complete(upload.id, part_ids=part_ids) == first
    replace(stored, status="pending").save()
    with pytest.raises(sdk.ConflictError, match="is completed already"):
        await openai.uploads.cancel(upload.id)
    assert [each.id async for each in openai.files.list()] == [first.file.id if first.file else None]


@pytest.mark.parametrize(
    ("part_ids", "more", "param", "message"),
    [
        ((0,), {}, "part_ids", "these parts have 3 bytes, and the upload was created for 6"),
        ((0, 0), {}, "part_ids", "an id is there twice"),
        ((0, "part_" + "0" * 24), {}, "part_ids", "there is no part"),
        ((0, "../../../etc"), {}, "part_ids", "there is no part"),
        ((), {}, "part_ids", "these parts have 0 bytes"),
        ((1, 0), {"md5": hashlib.md5(b"abcdef").hexdigest()}, "md5", "check the order"),
        ((0, 1), {"md5": "abc"}, "md5", "32 hexadecimal digits"),
        ((0, 1), {"extra_body": {"part_ids": "x"}}, "part_ids", "must be a list"),
        ((0, 1), {"extra_body": {"name": "x"}}, "name", "not a field of a completion"),
    ],
)
async def test_a_wrong_completion_is_told_and_may_be_mended(
    openai: AsyncOpenAI,
    folder: Path,
    part_ids: tuple[int | str, ...],
    more: dict[str, object],
    param: str,
    message: str,
) -> None:
    upload = await created(openai, 6)
    ids = await added(openai, upload, b"abc", b"def")
    named = [ids[each] if isinstance(each, int) else each for each in part_ids]
    with pytest.raises(sdk.BadRequestError, match=message) as refused:
        await openai.uploads.complete(upload.id, part_ids=named, **more)  # type: ignore[arg-type]
    assert refused.value.param == param
    assert on_disk(folder) == [upload.id], "no file"
    done = await openai.uploads.complete(upload.id, part_ids=ids)
    assert done.file is not None
    assert (await openai.files.content(done.file.id)).content == b"abcdef"


@pytest.mark.parametrize(
    ("changed", "status", "param"),
    [
        ({"purpose": "fine-tune"}, 400, "purpose"),
        ({"bytes": 209_715_201}, 413, "bytes"),
        ({"bytes": -1}, 400, "bytes"),
        ({"bytes": True}, 400, "bytes"),
        ({"bytes": "9"}, 400, "bytes"),
        ({"filename": None}, 400, "filename"),
        ({"mime_type": 1}, 400, "mime_type"),
        ({"purpose": "x" * 9_999}, 400, "purpose"),
        ({"bytes": 10**30}, 413, "bytes"),
        ({"bytes": 1.0}, 400, "bytes"),
        ({"expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "expires_after"),
        ({"part_ids": []}, 400, "part_ids"),
    ],
)
async def test_a_wrong_upload_is_refused_before_anything_is_sent(
    openai: AsyncOpenAI, folder: Path, changed: dict[str, object], status: int, param: str
) -> None:
    body = {"bytes": 1, "filename": "x", "mime_type": "text/jsonl", "purpose": "batch", **changed}
    with pytest.raises(sdk.APIStatusError) as refused:
        await openai.post("/uploads", body=body, cast_to=httpx.Response)
    assert (refused.value.status_code, refused.value.param) == (status, param)
    assert on_disk(folder) == []


async def test_names_and_ids_of_any_characters_are_answered(openai: AsyncOpenAI, gateway: HttpGateway) -> None:
    about = {"bytes": 1, "mime_type": "", "purpose": "batch"}
    async with httpx.AsyncClient(base_url=gateway.base_url) as http:
        for name in ("../../x", "\\u0000\\n", "\\ud800", "y" * 9_999, "\u00e9\u4e2d"):
            body = json.dumps({**about, "filename": "NAME"}).replace("NAME", name)
            made = await http.post("/uploads", content=body.encode())
            assert made.status_code in (200, 400), (name, made.text)
            if made.status_code == 200:
                assert len(made.json()["filename"]) <= 255
        for wrong in ("upload_" + "0" * 24, "upload_..%2f..", "x" * 5_000, "file-" + "0" * 24):
            for verb in ("complete", "cancel", "parts"):
                answer = await http.post(f"/uploads/{wrong}/{verb}", content=b'{"part_ids": ["\\ud800"]}')
                assert answer.status_code == 404, answer.text
    upload = await created(openai, 1)
    async with httpx.AsyncClient(base_url=gateway.base_url) as http:
        for text in (b'{"part_ids": ["\\ud800"]}', b'{"\\ud800": 1}', b"[]", b"", b"{}", b'{"part_ids": [[]]}'):
            answer = await http.post(f"/uploads/{upload.id}/complete", content=text)
            assert answer.status_code == 400, (text, answer.text)


async def test_parts_have_no_more_bytes_than_the_upload_and_one_repetition(openai: AsyncOpenAI, folder: Path) -> None:
    upload = await created(openai, 6)
    with pytest.raises(sdk.BadRequestError, match="created for 6 bytes"):
        await added(openai, upload, b"1234567")
    await added(openai, upload, b"123456", b"123456")
    with pytest.raises(sdk.BadRequestError, match="would have 13"):
        await added(openai, upload, b"1")
    assert len(list(folder.glob("files/*/upload_*/*file-*"))) == 2


async def test_too_many_parts_are_refused(openai: AsyncOpenAI, folder: Path) -> None:
    upload = await created(openai, 5_000)
    await added(openai, upload, b"1")
    (part,) = folder.glob("files/*/upload_*/file-*")
    for n in range(999):
        copy = part.with_name(f"file-{n:024x}")
        copy.mkdir()
        (copy / "about.json").write_bytes((part / "about.json").read_bytes())
    with pytest.raises(sdk.BadRequestError, match="has 1,000 parts"):
        await added(openai, upload, b"3")


async def test_an_ended_upload_takes_no_part_and_keeps_its_end(openai: AsyncOpenAI, folder: Path) -> None:
    cancelled, completed = await created(openai, 1), await created(openai, 1)
    ids = await added(openai, cancelled, b"1")
    for _ in range(2):
        assert (await openai.uploads.cancel(cancelled.id)).status == "cancelled"
    assert list(folder.glob("files/*/upload_*/*file-*")) == [], "the parts are gone"
    with pytest.raises(sdk.ConflictError, match="is cancelled already"):
        await openai.uploads.complete(cancelled.id, part_ids=ids)
    done = await openai.uploads.complete(completed.id, part_ids=await added(openai, completed, b"1"))
    with pytest.raises(sdk.ConflictError, match="is completed already"):
        await openai.uploads.cancel(completed.id)
    for upload in (cancelled, completed):
        with pytest.raises(sdk.ConflictError):
            await added(openai, upload, b"1")
    assert [each.id async for each in openai.files.list()] == [done.file and done.file.id]


async def test_an_upload_and_its_parts_are_gone_after_an_hour(
    openai: AsyncOpenAI, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = await created(openai, 1)
    ids = await added(openai, upload, b"1")
    FileStore(folder).sweep()
    assert on_disk(folder) == [upload.id]
    monkeypatch.setattr(store, "time", SimpleNamespace(time=lambda: time.time() + 3_601))
    for call in (lambda: openai.uploads.complete(upload.id, part_ids=ids), lambda: openai.uploads.cancel(upload.id)):
        with pytest.raises(sdk.NotFoundError, match="expires an hour after"):
            await call()
    FileStore(folder).sweep()
    assert on_disk(folder) == []


@pytest.mark.parametrize("joined", [False, True])
async def test_an_upload_that_expires_while_it_is_joined_becomes_a_file(
    openai: AsyncOpenAI, folder: Path, monkeypatch: pytest.MonkeyPatch, *, joined: bool
) -> None:
    upload, join = await created(openai, 6), Upload.join
    ids = await added(openai, upload, b"abc", b"def")

    def join_late(self: Upload, parts: Sequence[StoredFile], new: NewFile, md5: Any) -> Iterator[bool]:
        if joined:
            yield from join(self, parts, new, md5)
        monkeypatch.setattr(store, "time", SimpleNamespace(time=lambda: time.time() + 3_601))
        FileStore(folder).sweep()
        if not joined:
            yield from join(self, parts, new, md5)

    monkeypatch.setattr(Upload, "join", join_late)
    done = await openai.uploads.complete(upload.id, part_ids=ids)
    assert done.file is not None
    assert (await openai.files.content(done.file.id)).content == b"abcdef"
    FileStore(folder).sweep()
    assert on_disk(folder) == [done.file.id], "the upload is gone"


async def test_a_part_that_is_cut_leaves_nothing(openai: AsyncOpenAI, gateway: HttpGateway, folder: Path) -> None:
    data = LINE * 50_000
    upload = await created(openai, len(data))
    body = form(data).replace(b'name="purpose"\r\n\r\nbatch\r\n--b0undary\r\nContent-Disposition: form-data; ', b"")
    body = body.replace(b'name="file"', b'name="data"')
    for part in range(1, 5):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        whole = request(body, path=f"/v1/uploads/{upload.id}/parts")
        writer.write(whole[: len(whole) - len(body) * part // 5])
        await writer.drain()
        writer.close()

    async def is_clean() -> bool:
        return not list(folder.glob("files/*/upload_*/*file-*"))

    await until(is_clean)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(whole)
    assert b" 200 " in await reader.readline(), "the whole body is a part"
    writer.close()


async def test_tenants_have_uploads_of_their_own_that_count_for_their_limit(
    redis_url: str, folder: Path, tmp_path: Path
) -> None:
    limits = ({"tenant": "acme", "batch_bytes": 1_000_000}, {"tenant": "other"})
    async with tenants(redis_url, folder, tmp_path / "keys.json", *limits) as (acme, other):
        with pytest.raises(sdk.PermissionDeniedError, match="at most 1,000,000"):
            await created(acme, 1_000_001)
        upload = await created(acme, 600_000)
        ids = await added(acme, upload, b"x" * 600_000)
        for call in (
            lambda: added(other, upload, b"1"),
            lambda: other.uploads.complete(upload.id, part_ids=ids),
            lambda: other.uploads.cancel(upload.id),
        ):
            with pytest.raises(sdk.NotFoundError):
                await call()
        for refused in (lambda: created(acme, 600_000), lambda: added(acme, upload, b"x" * 600_000)):
            with pytest.raises(sdk.PermissionDeniedError, match="at most 1,000,000"):
                await refused()
        done = await acme.uploads.complete(upload.id, part_ids=ids)
        assert done.file is not None
        assert done.file.bytes == 600_000
        with pytest.raises(sdk.PermissionDeniedError):
            await created(acme, 600_000)


async def test_a_file_counts_beside_the_parts_of_uploads(redis_url: str, folder: Path, tmp_path: Path) -> None:
    limits = {"tenant": "acme", "batch_bytes": 100_000}
    async with tenants(redis_url, folder, tmp_path / "keys.json", limits) as (acme,):
        await added(acme, await created(acme, 90_000), b"x" * 90_000)
        with pytest.raises(sdk.PermissionDeniedError, match="at most 100,000"):
            await acme.files.create(file=("in.jsonl", b"x" * 10_001), purpose="batch")
        body = {"messages": [{"role": "user", "content": "x" * 10_001}], "model": "m", "max_tokens": 1}
        with pytest.raises(sdk.PermissionDeniedError, match="at most 100,000"):
            await acme.post(
                "/messages/batches", cast_to=object, body={"requests": [{"custom_id": "a", "params": body}]}
            )
        assert (await acme.files.create(file=("in.jsonl", b"x" * 9_000), purpose="batch")).bytes == 9_000


async def test_two_completions_at_once_make_one_file(openai: AsyncOpenAI) -> None:
    data = LINE * 300_000
    upload = await created(openai, len(data))
    ids = await added(openai, upload, data[:2_000_000], data[2_000_000:])
    patient = openai.with_options(max_retries=5)
    ended = await asyncio.gather(*(patient.uploads.complete(upload.id, part_ids=ids) for _ in range(8)))
    (file,) = [each async for each in openai.files.list()]
    assert {done.file and done.file.id for done in ended} == {file.id}
    assert (await openai.files.content(file.id)).content == data
