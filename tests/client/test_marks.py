"""Marks by which jobs are found whose prompts begin alike."""

import json

from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from sluice.contract.marks import marks_of

# The same rule in Lua, since a server can only compute marks in Lua for producers that send none.
LUA = """
local body = string.sub(ARGV[1], 1, 262144)
local first = string.find(body, '"messages":', 1, true) or 1
local length, wanted, found, chain = #body - first + 1, {}, {}, ''
for rung = 0, 4 do
  local size = 1024 * 4 ^ rung
  local last = math.floor(length / size)
  for at = math.max(1, last - 5), last do wanted[at * size] = true end
end
for at = 1024, length, 1024 do
  chain = redis.sha1hex(chain .. string.sub(body, first + at - 1024, first + at - 1))
  if wanted[at] then found[#found + 1] = string.sub(chain, 1, 12) .. ' ' .. string.format('%d', at) end
end
return { table.concat(found, ' '), #ARGV[1] - first + 1 }
"""


def body_of(text: str, **fields: str) -> bytes:
    return json.dumps(
        {"a": [{**fields, "messages": [{"role": "user", "content": text}]}]}, separators=(",", ":")
    ).encode()


def pairs(body: bytes) -> set[tuple[str, int]]:
    words = marks_of(body)[0].split()
    return {(mark, int(end)) for mark, end in zip(words[::2], words[1::2], strict=True)}


async def test_lua_finds_the_same_marks(db: Redis) -> None:
    for size in (0, 900, 5_000, 70_000, 400_000, 1_100_000):
        for body in (body_of("word " * (size // 5), tenant="acme"), b"\0\xff" * (size // 2)):
            marks, length = await db.eval(LUA, 0, body)  # type: ignore[misc]
            assert marks_of(body) == (marks.decode(), length)


@given(st.integers(0, 100_000), st.integers(1, 20_000))
def test_a_longer_turn_has_a_mark_near_the_end_of_the_shorter(before: int, more: int) -> None:
    text = ("".join(f"{number} " for number in range(before // 4)) + " " * 7)[:before]
    shorter, longer = body_of(text), body_of(text + "m" * more)
    common = max((end for _, end in pairs(shorter) & pairs(longer)), default=0)
    end = marks_of(shorter)[1]
    assert common <= end
    assert end - common < 1024 + more + 8  # 8: what closes the body


@given(st.text(max_size=50))
def test_fields_before_the_messages_change_no_mark(tenant: str) -> None:
    assert marks_of(body_of("word " * 2000, tenant=tenant)) == marks_of(body_of("word " * 2000))


def test_a_byte_changes_the_marks_behind_it_alone() -> None:
    one, other = body_of("a" * 9000), body_of("a" * 6000 + "b" + "a" * 2999)
    assert {end for _, end in pairs(one) & pairs(other)} == {3072, 4096, 5120}


def test_a_huge_body_has_few_marks_and_its_own_length() -> None:
    marks, length = marks_of(body_of("a" * 3_000_000))
    assert len(marks.split()) <= 60
    assert length > 3_000_000
