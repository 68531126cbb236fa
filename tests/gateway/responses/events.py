"""Builders of jobs' logs, of heads and of a response's events, and hypothesis strategies of logs."""

from collections.abc import Iterable, Iterator
from typing import Any

from hypothesis import strategies as st

from sluice.contract.events import EVENTS, Event, JobError, Timings, Usage
from sluice.interfaces.responses.record import ResponseHead, new_head
from sluice.interfaces.responses.request import read_response_request
from sluice.interfaces.responses.stream import ResponseState

Said = dict[str, Any]
ID = "resp_1"
ATTEMPT: Said = {"model": "default", "fingerprint": "fp_1", "worker": "w", "seed": 7}
USAGE = Usage(13, 5, 8, reasoning_tokens=2)
TIMINGS = Timings(0.0, 0.1, 0.2, 0.4, 10.0)
TOOLS: list[Said] = [
    {"type": "function", "name": "get_weather", "parameters": {"type": "object"}},
    {"type": "custom", "name": "apply_patch"},
    {"type": "namespace", "name": "files", "description": "", "tools": [{"type": "function", "name": "read"}]},
]


def head(**body: Any) -> ResponseHead:
    """Return the head of a response to a request."""
    return new_head(read_response_request({"input": "Hi.", **body}), ID, 1000, "default")


def log(*events: Said, start: int = 0) -> list[Event]:
    """Return a log: each event as its type and fields."""
    made = []
    for seq, fields in enumerate(events, start):
        kind = EVENTS[fields["type"]]
        made.append(kind(id=ID, seq=seq, attempt=1, ts=1000.5 + seq, **fields))
    return made


def stream_events(head: ResponseHead, log: Iterable[Event]) -> Iterator[Said]:
    """Yield the numbered events of a response for a job's log, as far as it is given."""
    state = ResponseState(head)
    yield from state.opening()
    for event in log:
        yield from state.add(event)


def started(kind: str = "started") -> Said:
    return {"type": kind, **ATTEMPT}


def delta(**said: Any) -> Said:
    return {"type": "delta", "token_ids": (1,), **said}


def call(index: int, name: str | None = None, arguments: str = "") -> Said:
    """Return a delta of a tool call: its beginning if it has a name."""
    first = {} if name is None else {"id": f"call_{index}", "type": "function"}
    function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
    return delta(tool_calls=({"index": index, **first, "function": function},))


def finished(reason: str = "stop") -> Said:
    return {"type": "finished", "finish_reason": reason, "usage": USAGE, "timings": TIMINGS}


def failed(kind: str = "internal") -> Said:
    return {"type": "failed", "error": JobError(kind, "It broke.", True), "usage": USAGE}


CANCELLED: Said = {"type": "cancelled", "reason": "requested", "usage": USAGE}
PROGRESS: Said = {"type": "progress", "phase": "prefill", "done": 1, "total": 2}

_texts = st.text(max_size=6)
_calls = st.builds(
    lambda index, name, pieces: [call(index, name, ""), *(call(index, None, piece) for piece in pieces)],
    st.integers(0, 3),
    st.sampled_from(["get_weather", "apply_patch", "files__read", "unknown"]),
    st.lists(st.sampled_from(['{"input": "', "a\\n", "\\ud83d", "\\ude00", '"}', "{}", "x"]), max_size=6),
)
_runs = st.one_of(
    _calls,
    st.lists(st.builds(lambda text: delta(content=text), _texts), max_size=3),
    st.lists(st.builds(lambda text: delta(reasoning=text), _texts), max_size=3),
    st.just([delta()]),
    st.just([PROGRESS]),
    st.just([started("resumed")]),
    st.just([started("restarted")]),
)
_endings = st.sampled_from([[finished()], [finished("length")], [finished("tool_calls")], [failed()], [CANCELLED], []])


@st.composite
def logs(draw: st.DrawFn) -> list[Event]:
    """Draw a log with any runs of text, reasoning and calls, and any ending or none."""
    runs = draw(st.lists(_runs, max_size=8))
    events = [event for run in runs for event in run]
    return log(started(), *events, *draw(_endings))
