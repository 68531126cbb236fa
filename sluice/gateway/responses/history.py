"""Stored responses as callers find them: retrieved, and continued by further responses."""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import aclosing
from functools import partial
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from sluice.client import Client
from sluice.contract import keys
from sluice.contract.events import Cancelled, Event, Failed, Usage
from sluice.errors import JobCancelled, JobFailed, SluiceError, UnknownJob
from sluice.gateway.body import in_thread_if_long, to_json
from sluice.gateway.caller import Caller
from sluice.gateway.gateway import Gateway
from sluice.http_errors import ErrorForm
from sluice.interfaces.errors import ApiError
from sluice.interfaces.fields import option, refusal
from sluice.interfaces.responses.record import (
    MAX_BYTES,
    PREFIX,
    Record,
    Response,
    ResponseHead,
    parse_record,
    skeleton,
)
from sluice.interfaces.responses.stream import ResponseState, from_completion
from sluice.submission import ExtraKey

logger = logging.getLogger("sluice.gateway")


def record_key(response_id: str) -> str:
    """String: the record of a response, as JSON."""
    return f"sluice:serve:response:{response_id}"


def final_key(response_id: str) -> str:
    """String: a response that has ended, as JSON."""
    return f"sluice:serve:response:{response_id}:final"


def _keys(response_ids: Sequence[str]) -> list[str]:
    return [key for each in response_ids for key in (record_key(each), final_key(each))]


async def _read(redis: Redis, response_ids: Sequence[str], ask: Callable[[Any, str], object]) -> list[Any]:
    async with redis.pipeline(transaction=False) as pipe:
        for key in _keys(response_ids):
            ask(pipe, key)
        return await pipe.execute()


def _source(name: str) -> str:
    return (files(__package__) / "lua" / f"{name}.lua").read_text("utf-8")


class Store:
    """Reads and writes records, and responses that have ended, on the server of their job. Every use of a response
    renews its time to live.

    Raises `ServerUnreachable`, or redis-py's error if the server refuses.
    """

    def __init__(self, client: Client, ttl_s: int) -> None:
        self._client = client
        self._ttl_s = ttl_s
        self._store_final = client.redis.register_script(_source("store_final"))
        self._delete_content = client.redis.register_script(_source("delete_content"))

    async def _at(self, response_id: str) -> Client:
        return await self._client.of_job(response_id, [record_key(response_id)])

    def record(self, response_id: str, record: bytes) -> ExtraKey:
        """Return the key of a record as JSON, to be set when the job of the response is queued."""
        return ExtraKey(record_key(response_id), record, self._ttl_s)

    async def read(self, response_id: str) -> bytes | None:
        """Return a record as JSON, and renew its time to live."""
        at, key = await self._at(response_id), record_key(response_id)
        found: bytes | None = await at.retries.run(lambda: at.redis.getex(key, ex=self._ttl_s))
        return found

    async def read_all(self, response_ids: Sequence[str]) -> list[tuple[bytes | None, bytes | None]]:
        """Return the record and the ended response of each id, as JSON, and renew their times to live."""
        return await self._of_each(response_ids, lambda pipe, key: pipe.getex(key, ex=self._ttl_s))

    async def _of_each(self, response_ids: Sequence[str], ask: Callable[[Any, str], object]) -> list[tuple[Any, Any]]:
        """Return the answers for the record and for the ended response of each id, in one round trip to each server."""
        servers = dict[Client, list[str]]()
        for response_id in dict.fromkeys(response_ids):
            servers.setdefault(await self._at(response_id), []).append(response_id)
        answers = dict[str, tuple[Any, Any]]()
        for at, ids in servers.items():
            found = await at.retries.run(partial(_read, at.redis, ids, ask))
            answers |= zip(ids, zip(found[::2], found[1::2], strict=True), strict=True)
        return [answers[response_id] for response_id in response_ids]

    async def final(self, response_id: str) -> Response | None:
        """Return a response that has ended, and renew its time to live."""
        found = await self.final_json(response_id)
        return None if found is None else await in_thread_if_long(len(found), json.loads, found)

    async def final_json(self, response_id: str) -> bytes | None:
        """Return a response that has ended as JSON, and renew its time to live."""
        at, key = await self._at(response_id), final_key(response_id)
        found: bytes | None = await at.retries.run(lambda: at.redis.getex(key, ex=self._ttl_s))
        return found

    async def length(self, response_id: str) -> int:
        """Return the bytes of a record and the ended response together."""
        return sum(await self.lengths([response_id]))

    async def lengths(self, response_ids: Sequence[str]) -> list[int]:
        """Return the bytes of the record and the ended response of each id together."""
        found = await self._of_each(response_ids, lambda pipe, key: pipe.strlen(key))
        return [record + final for record, final in found]

    async def store_final(self, response: Response) -> None:
        """Store a response that has ended, unless it was deleted. A failure is logged: the response can be made again
        from its job, until that has expired."""
        written = await to_json(response)
        held = [record_key(response["id"]), final_key(response["id"])]
        try:
            at = await self._at(response["id"])
            await at.retries.run(lambda: self._store_final(held, [written, self._ttl_s], client=at.redis))
        except (SluiceError, RedisError):
            logger.warning("response %s: its end was not stored", response["id"], exc_info=True)

    async def has_log(self, response_id: str) -> bool:
        """Return True if the job of a response has events."""
        at = await self._at(response_id)
        return bool(await at.retries.run(lambda: at.redis.exists(keys.log(response_id))))

    async def delete(self, response_id: str) -> None:
        """Delete a record and the ended response."""
        at = await self._at(response_id)
        await at.retries.run(lambda: at.redis.delete(record_key(response_id), final_key(response_id)))

    async def delete_content(self, response_id: str) -> bool:
        """Delete the content that the job of a response has. Returns False if the job has not ended."""
        held = [keys.job(response_id), keys.log(response_id), keys.result(response_id), keys.DEAD]
        at = await self._at(response_id)
        return bool(await at.retries.run(lambda: self._delete_content(held, [response_id], client=at.redis)))


_MAX_RESPONSES = 1000  # in one conversation
_CALLS = ("function_call", "custom_tool_call")
_PREVIOUS = "previous_response_id"
_ITEM_ID = re.compile(r"[a-z]+_(\w+)_(?:in)?\d+")  # of an item, with the end of its response's id


class History:
    """Finds responses for their tenants. For others a response does not exist."""

    def __init__(self, gateway: Gateway, store: Store) -> None:
        self._gateway = gateway
        self._store = store

    async def find(self, caller: Caller, response_id: str, param: str | None = None) -> Record:
        """Return the record of a response. The caller holds its bytes, and those of the response. Raises `ApiError`:
        404, and as `HeldBytes.add`."""
        if not keys.is_job_id(response_id):
            raise not_found(response_id, param)
        caller.held.add(await self._store.length(response_id))
        raw = await self._store.read(response_id)
        record = None if raw is None else await in_thread_if_long(len(raw), parse_record, raw)
        if record is None or (caller.tenant is not None and record.tenant != caller.tenant):
            raise not_found(response_id, param)
        return record

    async def current(self, record: Record) -> Response:
        """Return the response as it is now. Raises `ApiError` 404 if its job has expired without being read."""
        response_id = record.head.id
        if (final := await self._store.final(response_id)) is not None:
            return final
        state = await self._gateway.client.state(response_id)
        if state in ("queued", "running"):
            status = "in_progress" if state == "running" or not record.head.background else "queued"
            return {**skeleton(record.head), "status": status}
        response = await self._ended(record.head)
        await self._store.store_final(response)
        return response

    async def has_events(self, record: Record) -> bool:
        """Return False if the events of the response have expired."""
        if await self._store.has_log(record.head.id):
            return True
        return await self._gateway.client.state(record.head.id) in ("queued", "running")

    async def conversation(
        self, caller: Caller, response_id: str
    ) -> tuple[tuple[str, ...], tuple[dict[str, Any], ...]]:
        """Return the conversation up to a response, it included: the ids of its responses, oldest first, and their
        items. Raises `ApiError`, which names `previous_response_id`."""
        last = await self.find(caller, response_id, _PREVIOUS)
        ids = (*last.previous, response_id)
        if len(ids) > _MAX_RESPONSES:
            raise refusal(_PREVIOUS, f"the conversation has {len(ids):,} responses; begin a new one.")
        response = await self.current(last)
        if response["status"] in ("queued", "in_progress"):
            raise refusal(_PREVIOUS, "the response has not ended yet; wait for it, or cancel it.")
        items = await self._items(caller, ids[:-1], [response_id])
        return ids, (*items, *last.items, *_completed_output(response))

    async def items(self, caller: Caller, record: Record) -> tuple[dict[str, Any], ...]:
        """Return the items that a response was made from."""
        return (*await self._items(caller, record.previous), *record.items)

    async def resolved(self, caller: Caller, items: Sequence[Any]) -> tuple[Any, ...]:
        """Return the items of an input with those of stored responses in place of references to them, all of which are
        read at once. The caller holds their bytes. Raises `ApiError` for one that is not stored."""
        known = await self._stored_items(caller, {_response_of(each["id"]) for each in items if _is_reference(each)})
        for place, item in enumerate(items):
            if _is_reference(item) and item["id"] not in known:
                raise not_found(item["id"], f"input[{place}].id")
        return tuple(known[item["id"]] if _is_reference(item) else item for item in items)

    async def _stored_items(self, caller: Caller, response_ids: Set[str]) -> dict[str, dict[str, Any]]:
        """Return the items of the caller's responses among these, inputs and outputs, by their ids."""
        ids = sorted(filter(keys.is_job_id, response_ids))
        lengths = await self._store.lengths(ids)
        if len(ids) > _MAX_RESPONSES or sum(lengths) > MAX_BYTES:
            problem = (
                f"it refers to items of {len(ids):,} responses, {sum(lengths):,} bytes; send the items themselves."
            )
            raise refusal("input", problem)
        caller.held.add(sum(lengths))
        found = await self._store.read_all(ids)
        known = dict[str, dict[str, Any]]()
        for record, final in await in_thread_if_long(sum(lengths), _parsed, found):
            if record is None or (caller.tenant is not None and record.tenant != caller.tenant):
                continue
            response = await self.current(record) if final is None else final
            known |= {each["id"]: each for each in (*record.items, *response["output"])}
        return known

    async def _items(
        self, caller: Caller, ids: tuple[str, ...], last: Sequence[str] = ()
    ) -> tuple[dict[str, Any], ...]:
        """Return the items of responses that others continue: inputs and outputs. The caller holds their bytes. `last`:
        the end of the conversation, which the caller holds already, and which counts for the limit."""
        lengths = await self._store.lengths([*ids, *last])
        if sum(lengths) > MAX_BYTES:
            raise refusal(_PREVIOUS, f"the conversation has more than {MAX_BYTES:,} bytes; begin a new one.")
        length = sum(lengths[: len(ids)])
        caller.held.add(length)
        found = await self._store.read_all(ids)
        return await in_thread_if_long(length, _joined, ids, found)

    async def _ended(self, head: ResponseHead) -> Response:
        """Return the response of a job that has ended, from its log, or else from its result."""
        state = ResponseState(head)
        if not await self._store.has_log(head.id):
            return await self._from_result(head)
        try:
            async with aclosing(self._gateway.jobs.events(head.id)) as events:
                async for event in events:
                    state.add(event)
            return state.response
        except UnknownJob:
            return await self._from_result(head)

    async def _from_result(self, head: ResponseHead) -> Response:
        try:
            completion = await self._gateway.client.result(head.id, timeout=1.0)  # it is stored, or has expired
            return from_completion(head, completion).response
        except JobFailed as error:
            return _state_after(head, Failed(type="failed", error=error.error, **_nothing_else(head)))
        except JobCancelled as error:
            return _state_after(head, Cancelled(type="cancelled", reason=error.reason, **_nothing_else(head)))
        except (TimeoutError, UnknownJob):
            raise ApiError(ErrorForm.NOT_FOUND, "The result of the response has expired.") from None


def _joined(ids: Sequence[str], found: Sequence[tuple[bytes | None, bytes | None]]) -> tuple[dict[str, Any], ...]:
    """Return the items of the records and responses that were found. Raises `ApiError` if one is missing."""
    items = list[dict[str, Any]]()
    for response_id, (record, final) in zip(ids, _parsed(found), strict=True):
        if record is None or final is None:
            raise not_found(response_id, _PREVIOUS)
        items += [*record.items, *_completed_output(final)]
    return tuple(items)


def _parsed(found: Sequence[tuple[bytes | None, bytes | None]]) -> list[tuple[Record | None, Response | None]]:
    return [
        (None if record is None else parse_record(record), None if final is None else json.loads(final))
        for record, final in found
    ]


def _response_of(item_id: str) -> str:
    """Return the id of the response that an item of this id is stored with."""
    named = _ITEM_ID.fullmatch(item_id)
    return f"{PREFIX}{named[1]}" if named else item_id


def _is_reference(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "item_reference" and isinstance(item.get("id"), str)


def not_found(response_id: str, param: str | None = None) -> ApiError:
    """Return the error for a response that does not exist, has expired, or is another tenant's."""
    name = json.dumps(response_id[:80])
    return ApiError(ErrorForm.NOT_FOUND, f"There is no response {name}, or it has expired.", param=param)


def _nothing_else(head: ResponseHead) -> dict[str, Any]:
    """Return the fields of a final event of which nothing but the ending is known."""
    return {"id": head.id, "seq": 0, "attempt": 1, "ts": 0.0, "usage": Usage(0, 0, 0)}


def _state_after(head: ResponseHead, event: Event) -> Response:
    state = ResponseState(head)
    state.add(event)
    return state.response


def _completed_output(response: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the output of a response without the calls that were cut off."""
    return [item for item in response["output"] if item["type"] not in _CALLS or item["status"] == "completed"]


def page(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the page of items that the query's `limit`, `order` and `after` select. Raises `ApiError`."""
    order = option(query.get("order", "desc"), ("asc", "desc"), "order")
    ordered = list(items if order == "asc" else reversed(items))
    rest = ordered[_start(ordered, query.get("after")) :]
    shown = rest[: _limit(query.get("limit", "20"))]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(rest) > len(shown),
    }


def _limit(given: str) -> int:
    if not (given.isascii() and given.isdigit() and len(given) < 4 and 1 <= int(given) <= 100):
        raise refusal("limit", "it must be a whole number from 1 to 100.")
    return int(given)


def _start(ordered: Sequence[dict[str, Any]], after: str | None) -> int:
    if after is None:
        return 0
    for index, item in enumerate(ordered, 1):
        if item["id"] == after:
            return index
    raise refusal("after", "there is no item with this id among the response's.")
