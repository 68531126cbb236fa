"""Errors that the user can fix, with the remedy in the message."""

import logging
import math
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from ssl import SSLCertVerificationError

import typer
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    InvalidResponse,
    NoPermissionError,
    RedisError,
    TimeoutError,
)

from sluice.cli.terminal.view import note
from sluice.client import Client
from sluice.contract import keys
from sluice.contract.redis_url import UNREADABLE, MapFile, redacted
from sluice.contract.refusals import reason_of
from sluice.errors import NoWorker, QueueFull, ServerFull, UnknownJob, UnreadableLog
from sluice.mapped import open_client
from sluice.transport import connect, wrong_credentials

INSTALL = "in a checkout of Sluice, run ./scripts/setup worker,server"  # worker, gateway, embedded server

# A command without a log of its own names the servers that do not answer once, at its end.
logging.getLogger("sluice.client").addHandler(logging.NullHandler())

_START_HINT = "`sluice up --model FOLDER_OR_HUB_ID` starts one with a worker; --redis-url selects another."
_ACL_HINT = "docs/operations.md has its line under Users, for all commands: ACL SETUSER operator."
_URL_HINT = (
    "The URL must name an existing database, such as 0 after the last /, of a Redis 7 or Valkey that accepts writes."
)


class CliError(Exception):
    """Ends the command with this message and exit code."""

    def __init__(self, sentence: str, *, exit_code: int = 2) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


@contextmanager
def needs_gateway() -> Iterator[None]:
    """Raise `CliError` if the block cannot import the gateway, which is an extra of the package."""
    try:
        yield
    except ImportError as missing:
        raise CliError(f"the gateway is not installed here ({missing}): {INSTALL}") from None


@contextmanager
def needs_worker() -> Iterator[None]:
    """Raise `CliError` if the block cannot import the worker, which is a distribution of its own."""
    try:
        yield
    except ImportError as missing:
        raise worker_missing(missing) from None


def worker_missing(missing: ImportError | None) -> CliError:
    """Return the error of a command that needs the worker where it, or a package of its, is not installed."""
    what = f" ({missing})" if missing else ""
    return CliError(f"the worker is not installed here{what}: {INSTALL}")


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Client]:
    """Yield a client whose server has answered. The client's errors inside the block become `CliError`. `url` may be
    the map of several servers: those that did not answer are named at the end."""
    async with _client(url) as client, _absent_named(client):
        try:
            await _check_reachable(client, url)
            yield client
        except RedisError as error:
            raise CliError(await _explain(error, url)) from None
        except UnknownJob as error:
            where = f"the servers of {url} are those" if isinstance(url, MapFile) else f"{redacted(url)} is the server"
            remedy = f"Check the id, and if {where} that it was submitted to."
            raise CliError(f"{sentence(str(error))} {remedy}") from None
        except UnreadableLog as error:
            raise CliError(f"{sentence(str(error))} Another program changed it, so the job cannot be shown.") from None
        except NoWorker as missing:
            raise CliError(f"{sentence(str(missing))} Nothing was queued. {start_worker(missing.model)}") from None
        except QueueFull as full:
            raise CliError(_explain_full(full), exit_code=4) from None


def start_worker(model: str) -> str:
    """Return how to start a worker that serves the model."""
    name = "" if model == keys.DEFAULT_MODEL else f" --name {model}"
    return f"Start one: sluice worker --model FOLDER_OR_HUB_ID{name}"


def sentence(text: str) -> str:
    """Return the text, with a period added if it has no end mark."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


def refuse_bad_id(job_id: str) -> None:
    """Check a job id. Raises `CliError`."""
    try:
        keys.check_job_id(job_id)
    except ValueError as error:
        raise CliError(sentence(str(error))) from None


def _client(url: str) -> Client:
    try:
        return open_client(url)
    except ValueError as error:
        variable = "SLUICE_REDIS_URLS: " if isinstance(url, MapFile) else ""
        raise CliError(f"{variable}{sentence(str(error))}") from None


@asynccontextmanager
async def _absent_named(client: Client) -> AsyncIterator[None]:
    """Print a note about each server of a map that did not answer."""
    yield
    for each in client.absent:
        note(sentence(each), style="yellow")


async def _check_reachable(client: Client, url: str) -> None:
    try:
        await client.ping()
    except ServerFull:
        pass  # it can be read, and a command that writes raises the error again
    except (ValueError, TypeError):  # redis-py checks host names and some options when it connects
        raise CliError(f"{redacted(url)!r} is not the URL of a server: {UNREADABLE}.") from None


async def _explain(error: RedisError, url: str) -> str:
    if isinstance(url, MapFile):
        return f"{sentence(str(error))} The servers are those of {url}."
    server = redacted(url)
    match error:
        case ServerFull():
            return f"the server at {server} takes no job, and nothing was queued: {reason_of(error)}."
        case AuthenticationError():
            return f"the server at {server} refuses the connection: {await wrong_credentials(connect(url))}."
        case NoPermissionError():
            return f"the server at {server} denies a command to its user: {sentence(str(error))} {_ACL_HINT}"
        case ConnectionError() | TimeoutError() if reason_of(error) is None:
            return f"no server answers at {server}: {_outage_reason(error, url)} {_START_HINT}"
        case InvalidResponse():
            return f"the server at {server} is not a Redis or Valkey. Check the host and the port."
    if reason := reason_of(error):
        return f"the server at {server} cannot be used: {reason}."
    return f"the server at {server} refused a command: {sentence(str(error))} {_URL_HINT}"


def _outage_reason(error: RedisError, url: str) -> str:
    """Return the reason by the type of the system's error, since redis-py's messages are long."""
    match _system_error(error):
        case ConnectionRefusedError():
            return "no process listens there."
        case FileNotFoundError():
            return "the socket does not exist."
        case socket.gaierror():
            return "its host name is unknown."
        case SSLCertVerificationError(verify_message=why):
            return f"its certificate is refused: {sentence(why)} Check ssl_ca_certs and the host in the URL."
        case OSError() if url.startswith("rediss"):
            return "it accepts no TLS connection. If it has no TLS, begin the URL with redis://."
        case ConnectionResetError():
            return "it closed the connection. All of its may be taken: close idle clients, or raise its maxclients."
        case OSError(errno=None):  # several addresses, each with its own error
            return "none of its addresses accepts a connection."
    return sentence(str(error))


def _system_error(error: BaseException | None) -> OSError | None:
    """Return the first OSError of the system in the chain of causes."""
    while error is not None:
        if isinstance(error, OSError) and not isinstance(error, RedisError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _explain_full(full: QueueFull) -> str:
    lengths = f"length {full.length:,}, limit {full.limit:,}"
    return f"the queue is full ({lengths}), and nothing was queued. Try again in {math.ceil(full.retry_after_s):,} s."


def confirm(question: str, *, refusal: str) -> None:
    """Ask on stderr. Raises `CliError`, with this text, for any answer but yes, and without a terminal."""
    try:
        agreed = typer.confirm(question, err=True)
    except typer.Abort:  # no terminal, or Ctrl-C
        agreed = False
        note("")
    if not agreed:
        raise CliError(refusal)
