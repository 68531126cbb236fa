"""Arguments and replies of scripts by name."""

from collections.abc import Sequence

import pytest
from redis.asyncio import Redis

from worker.queue.scripts import Argument, arguments, reply_fields, worker_source

# Returns the arguments as names and values, in the order of KEYS.
ECHO = """
local arguments, out = read_arguments({ first = true, second = true }), {}
for _, name in ipairs(KEYS) do
  out[#out + 1] = name
  out[#out + 1] = arguments[name]
end
return out
"""
PRELUDE = worker_source("final").partition("-- End a job")[0]


@pytest.mark.parametrize(
    "given",
    [
        {"a": 1, "b": "two", "c": b"\xff\x00"},
        {"first": [], "a": "x", "second": []},
        {"first": [b"\xff", "", "a"], "a": "a", "second": ["first", "2", "x"]},
        {"a": "", "first": [str(k) for k in range(5_000)]},
    ],
)
async def test_a_script_reads_the_arguments_that_were_given(
    db: Redis, given: dict[str, Argument | Sequence[Argument]]
) -> None:
    reply = await db.eval(PRELUDE + ECHO, len(given), *given, *arguments(**given))  # type: ignore[misc]
    assert reply_fields(reply) == {name: as_bytes(value) for name, value in given.items()}


def as_bytes(value: Argument | Sequence[Argument]) -> bytes | list[bytes]:
    if isinstance(value, bytes):
        return value
    return str(value).encode() if isinstance(value, str | int) else [bytes(as_bytes(item)) for item in value]


async def test_a_reply_with_a_name_without_a_value_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        reply_fields([b"a", 1, b"b"])
