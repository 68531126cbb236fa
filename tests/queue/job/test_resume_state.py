"""What an attempt leaves in the job's hash, in the form that workers of all versions read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.queue.job.resume_state import ResumeState, SpecPrefillReport

REPORT = b'{"fingerprint":"fp","draft":"small","why_whole":"","kept":[[0,3],[7,9]],"scoring_s":0.25}'
STORED: dict[str, bytes | None] = {"fingerprint": b"fp", "seed": b"7", "images": b"digest", "specprefill": REPORT}
STATE = ResumeState(
    fingerprint="fp",
    seed=7,
    images="digest",
    specprefill=SpecPrefillReport(kept=((0, 3), (7, 9)), draft="small", scoring_s=0.25, fingerprint="fp"),
)


def as_stored(state: ResumeState) -> dict[str, bytes | None]:
    return {name: str(value).encode() for name, value in state.as_fields().items()}


def test_the_fields_of_a_job_s_hash_are_a_state() -> None:
    assert ResumeState.load(STORED) == STATE


def test_a_state_is_stored_in_the_fields_that_earlier_versions_read() -> None:
    fields = STATE.as_fields()
    assert json.loads(str(fields.pop("specprefill"))) == json.loads(REPORT)
    assert fields == {"fingerprint": "fp", "seed": 7, "images": "digest"}


def test_a_new_answer_clears_the_decisions_of_an_earlier_one() -> None:
    fields = ResumeState(fingerprint="fp", seed=7).as_fields()
    assert fields == {"fingerprint": "fp", "seed": 7, "images": "", "specprefill": ""}


@pytest.mark.parametrize("empty", [None, b""])
def test_a_job_without_an_earlier_attempt_has_an_empty_state(empty: bytes | None) -> None:
    assert ResumeState.load(dict.fromkeys(STORED, empty)) == ResumeState()


@given(
    st.builds(
        ResumeState,
        fingerprint=st.text(st.characters(codec="utf-8"), max_size=20),
        seed=st.none() | st.integers(-(2**63), 2**63 - 1),
        images=st.text(st.characters(codec="utf-8"), max_size=20),
        specprefill=st.none()
        | st.builds(
            SpecPrefillReport,
            kept=st.none() | st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3).map(tuple),
            draft=st.text(st.characters(codec="utf-8")),
            why_whole=st.text(st.characters(codec="utf-8")),
            scoring_s=st.floats(0, 1e6),
            fingerprint=st.text(st.characters(codec="utf-8")),
        ),
    )
)
def test_a_stored_state_is_read_as_it_was(state: ResumeState) -> None:
    assert ResumeState.load(as_stored(state)) == state


NOT_OURS = [
    b"{", b"[]", b"7", b"\xff", b"{}", b'{"fingerprint":"fp"}', b'{"fingerprint":"fp","kept":[1]}',
    b'{"fingerprint":"fp","kept":null,"more":1}', b"[" * 100_000,
    b'{"fingerprint":"fp","kept":[[0,1e400]]}', b'{"fingerprint":"fp","kept":[["0",9]]}',
    b'{"fingerprint":"fp","kept":[[0,9]],"scoring_s":"x"}', b'{"fingerprint":"fp","kept":[[0,9]],"scoring_s":NaN}',
    b'{"fingerprint":"fp","kept":null,"draft":5}', b'{"fingerprint":"fp","kept":null,"why_whole":[]}',
]  # fmt: skip


@pytest.mark.parametrize("report", NOT_OURS)
def test_a_report_of_another_program_is_not_read(report: bytes) -> None:
    assert ResumeState.load({**STORED, "specprefill": report}) is None


@pytest.mark.parametrize("foreign", [{"seed": b"x"}, {"seed": b"1.5"}, {"fingerprint": b"\xff"}, {"images": b"\xff"}])
def test_a_state_with_a_foreign_value_is_not_read(foreign: dict[str, bytes]) -> None:
    assert ResumeState.load({**STORED, **foreign}) is None
