import json
from io import BytesIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.process.frames import BadFrame, Frame, FrameKind, read_frame, write_frame

FRAMES = st.builds(
    Frame,
    st.sampled_from(FrameKind),
    st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner)),
    st.binary(),
)


def written(*frames: Frame) -> bytes:
    pipe = BytesIO()
    for frame in frames:
        write_frame(pipe, frame)
    return pipe.getvalue()


@given(st.lists(FRAMES, max_size=4))
def test_frames_are_read_as_they_were_written(frames: list[Frame]) -> None:
    pipe = BytesIO(written(*frames))
    assert [read_frame(pipe) for _ in frames] == frames
    assert pipe.read() == b""


@given(FRAMES, st.data())
def test_a_frame_that_is_cut_off_is_refused(frame: Frame, data: Any) -> None:
    whole = written(frame)
    with pytest.raises(BadFrame):
        read_frame(BytesIO(whole[: data.draw(st.integers(0, len(whole) - 1))]))


@given(st.binary())
def test_whatever_comes_is_a_frame_or_refused(said: bytes) -> None:
    try:
        frame = read_frame(BytesIO(said))
    except BadFrame:
        return
    assert json.dumps(frame.head)


@pytest.mark.parametrize(
    "said",
    [
        b"\x00\x00\x00\x00\x04\x00\x00\x00\x00null",
        b"\x63\x00\x00\x00\x04\x00\x00\x00\x00null",
        b"\x02\x00\x00\x00\x04\x00\x00\x00\x00nuts",
        b"\x02\x00\x00\x00\x01\x00\x00\x00\x00\xff",
        b"\x02\x00\x01\x86\xa0\x00\x00\x00\x00" + b"[" * 100_000,
        b"\x02\xff\xff\xff\xff\xff\xff\xff\xff",
    ],
    ids=["no kind", "unknown kind", "no JSON", "no text", "too deep", "huge"],
)
def test_garbage_is_refused(said: bytes) -> None:
    with pytest.raises(BadFrame):
        read_frame(BytesIO(said))
