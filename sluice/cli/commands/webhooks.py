"""`sluice webhooks`: registers the endpoints that are told of ends, and shows what is delivered to them."""

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from typing import Annotated, Any

import typer

from sluice.batch.source import parse_window
from sluice.cli.commands.batch.run import stoppable
from sluice.cli.errors import CliError, connected, needs_gateway, sentence
from sluice.cli.options import REDIS_URL, AsJson, RedisUrl
from sluice.cli.terminal.output import format_duration, print_json, print_table
from sluice.cli.terminal.view import note
from sluice.client import Client
from sluice.contract.keys import TENANT_CHARACTERS
from sluice.webhooks.endpoint import Delivery, Endpoint, read_events
from sluice.webhooks.store import Counts, WebhookStore

EndpointId = Annotated[str, typer.Argument(metavar="ID", help="Id of the endpoint, as in `sluice webhooks list`.")]

webhooks = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@webhooks.callback()
def _about() -> None:
    """Tell URLs when runs, responses and jobs have ended.

    The responses are those with background: true. The requests follow the Standard Webhooks specification, and
    OpenAI's clients verify them. `sluice serve` and `sluice up` send them, and so does `sluice webhooks deliver`.

    \b
    Example:
      sluice webhooks add https://example.com/hook --event "batch.*"
    """


@webhooks.command()
def add(
    url: Annotated[str, typer.Argument(metavar="URL", help="The URL that gets the requests.")],
    event: Annotated[
        list[str],
        typer.Option(metavar="NAME", help="An event, such as batch.completed, or all of a kind: batch.*; repeatable."),
    ],
    tenant: Annotated[
        str | None, typer.Option(metavar="NAME", help="Send this tenant's events only.  [default: those of all]")
    ] = None,
    allow_private: Annotated[
        bool,
        typer.Option("--allow-private", help="Allow http, and addresses of this machine and of private networks."),
    ] = False,
    redis_url: RedisUrl = REDIS_URL,
    as_json: AsJson = False,
) -> None:
    """Register an endpoint, and print its secret.

    \b
    Events: batch.completed, batch.failed, batch.cancelled, batch.expired, response.completed, response.failed,
    response.cancelled, response.incomplete, job.finished, job.failed, job.cancelled. Those of responses are sent for
    ones with background: true, and those of jobs for jobs that neither the gateway nor a run has queued.

    The secret is shown this once. It goes to stdout, all else to stderr.

    \b
    Examples:
      sluice webhooks add https://example.com/hook --event "batch.*" --event response.completed
      sluice webhooks add http://localhost:9000/hook --event job.failed --tenant acme --allow-private
    """
    with needs_gateway():
        from sluice.network import BadUrl
        from sluice.webhooks.deliverer import check_url
    if tenant is not None and not 0 < len(tenant) <= TENANT_CHARACTERS:
        raise CliError(f"--tenant: a name has 1 to {TENANT_CHARACTERS} characters, not {len(tenant):,}.")
    try:
        check_url(url, allow_private=allow_private)
        events = read_events(event)
    except (BadUrl, ValueError) as error:
        raise CliError(sentence(str(error))) from None
    endpoint = Endpoint.new(url, events, tenant, allow_private=allow_private, created_at=int(time.time()))
    asyncio.run(_add(redis_url, endpoint))
    _print_secret(endpoint, as_json)
    note(f"{endpoint.id} is added; the secret is not shown again. Try it: sluice webhooks test {endpoint.id}")


@webhooks.command("list")
def list_endpoints(redis_url: RedisUrl = REDIS_URL, as_json: AsJson = False) -> None:
    """List the endpoints, and what waits for them.

    \b
    Examples:
      sluice webhooks list
      sluice webhooks list --json | jq -r 'select(.dead > 0).id'
    """
    found, dropped = asyncio.run(_read_endpoints(redis_url))
    if as_json:
        for endpoint, counts in found:
            print_json({**endpoint.shown(), **asdict(counts)})
    elif found:
        _print_endpoints(found)
    else:
        note("there are no endpoints.")
    if dropped:
        note(f"{dropped:,} events were dropped, because too many waited for a deliverer.", style="yellow")


@webhooks.command("test")
def send_test(id: EndpointId, redis_url: RedisUrl = REDIS_URL) -> None:
    """Send a test from here, and show the answer.

    The event is `webhook.test`. An endpoint that was disabled, because it had answered 410, is enabled again if it
    answers with 2xx. Exit codes: 0 if it did, 1 if it did not, 2 if there is no such endpoint.

    \b
    Example:
      sluice webhooks test we_1b9d6bcd4f0a
    """
    problem = asyncio.run(_test(redis_url, id))
    if problem:
        note(f"{id}: {problem}", style="red")
        raise typer.Exit(1)
    note(f"{id} has received the test")


@webhooks.command()
def rotate(
    id: EndpointId,
    overlap: Annotated[
        str, typer.Option(metavar="TIME", help="How long the old secret signs too: 24h, 30m; 0 ends it now.")
    ] = "24h",
    redis_url: RedisUrl = REDIS_URL,
    as_json: AsJson = False,
) -> None:
    """Give an endpoint a new secret, and print it.

    Until the overlap has passed, requests have a signature of each.

    \b
    Example:
      sluice webhooks rotate we_1b9d6bcd4f0a --overlap 2h
    """
    try:
        overlap_s = 0 if overlap == "0" else parse_window(overlap)
    except ValueError:
        raise CliError(f"--overlap: {overlap!r} is not a time; write one such as 24h or 30m, or 0.") from None
    endpoint = asyncio.run(_rotate(redis_url, id, overlap_s * 1000))
    _print_secret(endpoint, as_json)
    until = f"the old one signs for {overlap} more" if overlap_s else "the old one is void"
    note(f"{id} has a new secret, which is not shown again; {until}")


@webhooks.command()
def rm(id: EndpointId, redis_url: RedisUrl = REDIS_URL) -> None:
    """Remove an endpoint and all that waits for it.

    \b
    Example:
      sluice webhooks rm we_1b9d6bcd4f0a
    """
    asyncio.run(_remove(redis_url, id))
    note(f"{id} is removed")


@webhooks.command()
def deliveries(
    dead: Annotated[bool, typer.Option("--dead", help="List the dead letters, which were tried for a day.")] = False,
    redis_url: RedisUrl = REDIS_URL,
    as_json: AsJson = False,
) -> None:
    """List what waits, or the dead letters.

    \b
    Examples:
      sluice webhooks deliveries
      sluice webhooks deliveries --dead --json | jq -r .id
    """
    found = asyncio.run(_read_deliveries(redis_url, dead))
    if as_json:
        for endpoint_id, delivery, due_ms in found:
            print_json({"endpoint": endpoint_id, **asdict(delivery), "due_ms": due_ms})
    elif found:
        _print_deliveries(found, dead)
    else:
        note("there are no dead letters." if dead else "no deliveries wait.")


@webhooks.command()
def retry(
    id: Annotated[str, typer.Argument(metavar="ID", help="Id of an event, or of an endpoint for all of its.")],
    redis_url: RedisUrl = REDIS_URL,
) -> None:
    """Deliver dead letters again, for another day.

    Exit codes: 0, or 2 if there are none.

    \b
    Examples:
      sluice webhooks retry evt_0d6bc9aa41c09f0c9bd6a4c4b3c3b9b5
      sluice webhooks retry we_1b9d6bcd4f0a
    """
    retried = asyncio.run(_retry(redis_url, id))
    if not retried:
        raise CliError(f"there is no dead letter of {id!r}; list them: sluice webhooks deliveries --dead")
    note(f"{retried:,} {'delivery waits' if retried == 1 else 'deliveries wait'} again")


@webhooks.command("deliver")
def deliver_events(redis_url: RedisUrl = REDIS_URL) -> None:
    """Deliver until Ctrl-C or SIGTERM, as gateways do.

    Any number of these processes share the work.

    \b
    Example:
      sluice webhooks deliver --redis-url redis://localhost:6379/0
    """
    with needs_gateway():
        from sluice.webhooks.deliverer import deliver
    logging.basicConfig(level="WARNING", format="%(asctime)s %(levelname).1s %(name)s: %(message)s")
    logging.getLogger("sluice").setLevel("INFO")

    async def run() -> None:
        async with connected(redis_url) as client:
            note("delivering webhooks; Ctrl-C ends it")
            await deliver(client)

    asyncio.run(stoppable(run()))


def _store(server: Client) -> WebhookStore:
    return WebhookStore(server.redis, server.retries)


async def _stores(client: Client) -> list[WebhookStore]:
    """Return the store of each server, once all of them answer: they have the same endpoints, and half a change would
    leave a secret that nobody has seen."""
    for server in client.servers:
        await server.ping()
    return [_store(server) for server in client.servers]


async def _add(url: str, endpoint: Endpoint) -> None:
    async with connected(url) as client:
        for store in await _stores(client):
            try:
                await store.add(endpoint)
            except ValueError as error:
                raise CliError(sentence(str(error))) from None


async def _read_endpoints(url: str) -> tuple[list[tuple[Endpoint, Counts]], int]:
    async def read(server: Client) -> tuple[list[Endpoint], dict[str, Counts], int]:
        store = _store(server)
        endpoints = await store.endpoints()
        return endpoints, {each.id: await store.counts(each.id) for each in endpoints}, await store.dropped()

    async with connected(url) as client:
        answers = await client.ask_all(read)
    endpoints = answers[0][0]
    counted = [sum([counts.get(each.id, Counts()) for _, counts, _ in answers], Counts()) for each in endpoints]
    return [*zip(endpoints, counted, strict=True)], sum(dropped for _, _, dropped in answers)


async def _find(store: WebhookStore, id: str) -> Endpoint:
    for endpoint in await store.endpoints():
        if endpoint.id == id:
            return endpoint
    raise _unknown(id)


async def _test(url: str, id: str) -> str:
    """Return why the endpoint did not receive a test; empty if it did, and then enable it."""
    with needs_gateway():
        from sluice.webhooks.deliverer import Sender
    async with connected(url) as client:
        stores = await _stores(client)
        endpoint = await _find(stores[0], id)
        now_ms = round(time.time() * 1000)
        event: dict[str, Any] = {"id": f"evt_test{now_ms}", "object": "event", "created_at": now_ms // 1000}
        event |= {"type": "webhook.test", "data": {"id": id}}
        sender = Sender()
        answer = await sender.send(endpoint, event["id"], json.dumps(event).encode(), now_ms)
        sender.close()
        if not answer.problem and endpoint.disabled:
            for store in stores:
                await store.change(id, lambda now: replace(now, disabled=None))
        return answer.problem


async def _rotate(url: str, id: str, overlap_ms: int) -> Endpoint:
    async with connected(url) as client:
        stores = await _stores(client)
        endpoint = (await _find(stores[0], id)).rotated(round(time.time() * 1000), overlap_ms)
        for store in stores:
            if await store.change(id, lambda now: replace(now, secrets=endpoint.secrets)) is None:
                raise _unknown(id)
        return endpoint


async def _remove(url: str, id: str) -> None:
    async with connected(url) as client:
        removed = [await store.change(id, lambda _: None) for store in await _stores(client)]
        if not any(removed):
            raise _unknown(id)


async def _read_deliveries(url: str, dead: bool) -> list[tuple[str, Delivery, int | None]]:
    """Return the id of the endpoint, the delivery, and when it is due, in Unix milliseconds."""

    async def read(server: Client) -> list[tuple[str, Delivery, int | None]]:
        store = _store(server)
        found: list[tuple[str, Delivery, int | None]] = []
        for endpoint in await store.endpoints():
            if dead:
                found += [(endpoint.id, each, None) for each in await store.dead(endpoint.id)]
            else:
                found += [(endpoint.id, each, due_ms) for each, due_ms in await store.waiting(endpoint.id)]
        return found

    async with connected(url) as client:
        answers = await client.ask_all(read)
    return sorted((each for found in answers for each in found), key=lambda each: each[1].since_ms)


async def _retry(url: str, id: str) -> int:
    async def retry_on(server: Client) -> int:
        store = _store(server)
        now_ms = await store.now_ms()
        letters = [(each.id, None if each.id == id else id) for each in await store.endpoints()]
        return sum([await store.retry(endpoint_id, event_id, now_ms) for endpoint_id, event_id in letters])

    async with connected(url) as client:
        return sum(await client.ask_all(retry_on))


def _unknown(id: str) -> CliError:
    return CliError(f"there is no endpoint {id!r}; list them: sluice webhooks list")


def _print_secret(endpoint: Endpoint, as_json: bool) -> None:
    secret = endpoint.secrets[0].value
    if as_json:
        print_json({**endpoint.shown(), "secret": secret})
    else:
        print(secret)


def _print_endpoints(found: Sequence[tuple[Endpoint, Counts]]) -> None:
    print_table(
        "Endpoints",
        {"id": "left", "url": "left", "events": "left", "tenant": "left", "waiting": "right", "dead": "right",
         "dropped": "right", "oldest": "right", "last": "left"},
        [
            (each.id, each.url, _short(each.events), each.tenant or "all", f"{counts.waiting:,}", f"{counts.dead:,}",
             f"{counts.dropped:,}", _age(counts.oldest_ms),
             f"disabled: {each.disabled}" if each.disabled else counts.last)
            for each, counts in found
        ],
    )  # fmt: skip


def _short(events: Sequence[str]) -> str:
    """Return the events, those of a kind as one if all are there."""
    kinds = dict.fromkeys(event.partition(".")[0] for event in events)
    whole = {kind for kind in kinds if {*read_events([f"{kind}.*"])} <= {*events}}
    return ", ".join(
        f"{kind}.*" if kind in whole else ", ".join(each for each in events if each.startswith(f"{kind}."))
        for kind in kinds
    )


def _age(since_ms: int | None) -> str:
    return "" if since_ms is None else format_duration(max(time.time() - since_ms / 1000, 0.0))


def _print_deliveries(found: Sequence[tuple[str, Delivery, int | None]], dead: bool) -> None:
    print_table(
        "Dead letters" if dead else "Deliveries",
        {"event": "left", "type": "left", "endpoint": "left", "attempts": "right", "since": "left", "next": "left",
         "last": "left"},
        [
            (each.id, each.type, endpoint_id, str(each.attempts), _time(each.since_ms),
             "never" if due_ms is None else _time(due_ms), each.problem)
            for endpoint_id, each, due_ms in found
        ],
    )  # fmt: skip


def _time(ms: int) -> str:
    return f"{datetime.fromtimestamp(ms / 1000).astimezone():%m-%d %H:%M:%S}"
