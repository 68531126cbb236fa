"""Marks by which jobs are found whose prompts begin alike."""

import json

from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from sluice.contract.scripts import read_lua
from sluice.submission import marks_of

# The same rule in Lua, since a server can only compute marks in Lua for producers that send none.
LUA = read_lua("worker.queue", "affinity") + "\nreturn { marks_of(ARGV[1]) }"


def body_with(*urls: str, text: str = "word " * 4000) -> bytes:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
    return json.dumps({"a": [{"messages": [message]}]}, separators=(",", ":")).encode()


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


IMAGE = "data:image/png;base64," + "iVBORw0K" * 100_000


async def test_lua_finds_the_same_marks_of_files(db: Redis) -> None:
    bodies = [
        body_with(IMAGE),
        body_with(IMAGE[:3_000], IMAGE[:9_000], "data:;base64,", IMAGE[:4_096], IMAGE[:4_095], IMAGE[:4_094]),
        body_with(*[IMAGE[:6_000]] * 600, text=""),
        body_with(text="data: " + "1,2 " * 9_000),
        body_with("data:" + "a" * 112 + ";base64," + "b" * 9_000, "data:" + "a" * 115 + ";base64," + "b" * 9_000),
        body_with(IMAGE)[:60_000],
        b'"data:' * 900 + b";base64," + b"a" * 9_000,
    ]
    for body in bodies:
        marks, length = await db.eval(LUA, 0, body)  # type: ignore[misc]
        assert marks_of(body) == (marks.decode(), length)
        assert all(end <= length for _, end in pairs(body))


def test_a_file_counts_as_its_first_4_kib_and_the_text_behind_it_in_full() -> None:
    text = marks_of(body_with(text="word " * 4000))[1]
    _, length = marks_of(body_with(IMAGE, IMAGE))
    assert text + 2 * 4096 < length < text + 2 * 4096 + 200
    one, other = body_with(IMAGE + "A", text="word " * 4000), body_with(IMAGE + "A", text="word " * 4000 + "more")
    assert max(end for _, end in pairs(one) & pairs(other)) > 4096 + 18_000


def test_a_text_that_begins_with_data_counts_in_full() -> None:
    assert marks_of(body_of("data: " + "1,2 " * 9_000))[1] > 36_000


def test_the_cost_of_many_files_is_bounded() -> None:
    assert marks_of(body_with(*[IMAGE[:6_000]] * 600))[1] > 500 * 4096 + 100 * 6_000
