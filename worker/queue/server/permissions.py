"""The commands, keys and channels that a worker needs, and a check which of them the server lacks or denies."""

from collections.abc import Sequence
from dataclasses import dataclass

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ExecAbortError, NoPermissionError, ResponseError

KEYS = ("sluice:*", "arq:*")
CHANNELS = ("sluice:*",)


@dataclass(frozen=True, slots=True)
class Need:
    """A command that a worker needs, with valid arguments."""

    command: str  # SCRIPT LOAD is two words
    arguments: tuple[str, ...] = ()

    name: str = ""  # the key or channel, if that is its first argument

    @property
    def rule(self) -> str:
        """Rule of ACL SETUSER that allows the command."""
        return "+" + self.command.lower().replace(" ", "|")


def _on(name: str, **commands: str) -> list[Need]:
    """Return the needs on one key or channel; the values are the other arguments."""
    return [Need(command, (name, *arguments.split()), name) for command, arguments in commands.items()]


MULTI, EXEC = Need("MULTI"), Need("EXEC")
# Commands inside scripts are included: the server checks each as if the user had sent it.
NEEDED: tuple[Need, ...] = (
    MULTI,
    EXEC,
    Need("PING"),
    Need("TIME"),
    Need("EVALSHA", ("0" * 40, "0")),
    Need("SCRIPT LOAD", ("return 1",)),
    *_on(
        "sluice:job:x", DEL="", EXISTS="", HDEL="f", HGET="f", HGETALL="", HINCRBY="f 1", HLEN="", HMGET="f",
        HSET="f v", HVALS="", PEXPIRE="1", PTTL="", TYPE="", UNLINK="",
    ),
    *_on("sluice:log:x", LINDEX="0", LLEN="", LRANGE="0 -1", RPUSH="v"),
    *_on("sluice:result:x", GET="", MGET="", SET="v"),
    *_on(
        "sluice:queue:x", ZADD="1 m", ZCARD="", ZCOUNT="0 1", ZLEXCOUNT="- +", ZRANGE="0 1", ZRANGEBYLEX="- +",
        ZRANGEBYSCORE="0 1", ZRANK="m", ZREM="m", ZSCORE="m",
    ),
    *_on("arq:job:x", DEL="", EXISTS="", GET="", PEXPIRE="1", SET="v", STRLEN=""),
    *_on("sluice:ch:x", PUBLISH="m", SUBSCRIBE=""),
)  # fmt: skip


async def forbidden(redis: Redis, needs: Sequence[Need]) -> list[Need]:
    """Return the needs that the user is denied. If MULTI is denied, only MULTI and EXEC are tested.

    Nothing is executed: the server checks a command when a transaction queues it, and drops the transaction when the
    connection closes. ACL DRYRUN would also work, but users without administrator rights may seldom call it. Raises
    RedisError, OSError.
    """
    try:
        async with redis.client() as client:  # with a connection of its own
            connection = client.connection
            assert connection is not None
            try:
                return await _denied_of(connection, needs)
            finally:
                await connection.disconnect()
    except NoPermissionError:
        return [Need("SELECT")]  # sent for a database other than 0; no other command of connecting can be denied


async def _denied_of(connection: AbstractConnection, needs: Sequence[Need]) -> list[Need]:
    # No transaction is open yet, so EXEC executes nothing.
    frame = [need for need in (EXEC, MULTI) if await _denied(connection, need)]
    if MULTI in frame:
        return frame  # without MULTI the commands would be executed
    return [*frame, *[need for need in needs if need not in (EXEC, MULTI) and await _denied(connection, need)]]


async def _denied(connection: AbstractConnection, need: Need) -> bool:
    await connection.send_command(*need.command.split(), *need.arguments)
    try:
        await connection.read_response()
    except (NoPermissionError, ExecAbortError):
        return True
    except ResponseError:
        return False  # no transaction to execute, or no memory
    return False


async def missing(redis: Redis, needs: Sequence[Need]) -> list[str]:
    """Return the commands that the server does not have, because its redis.conf renames them or because it is another
    kind of server; none if the user may not ask. Raises RedisError, OSError."""
    names = list(dict.fromkeys(need.command.split()[0] for need in needs))
    try:
        # In one word: redis-py cannot parse an unknown command in the answer to two.
        found = await redis.execute_command("COMMAND INFO", *names)  # type: ignore[no-untyped-call]
    except NoPermissionError:
        return []
    return [name for name, info in zip(names, found, strict=True) if info is None]


def describe(denied: Sequence[Need]) -> str:
    """Return the names of the commands, and the key or channel on which each was tested."""
    by_name: dict[str, list[str]] = {}
    for need in denied:
        by_name.setdefault(need.name, []).append(need.command)
    return "; ".join(", ".join(commands) + (f" on {name}" if name else "") for name, commands in by_name.items())


def acl_command(user: str, denied: Sequence[Need]) -> str:
    """Return the ACL command that allows these needs; if MULTI is denied, all needs."""
    commands = dict.fromkeys(need.rule for need in (NEEDED if MULTI in denied else denied))
    names = [*(f"~{pattern}" for pattern in KEYS), *(f"&{pattern}" for pattern in CHANNELS)]
    return " ".join(["ACL SETUSER", user, *names, *commands])
