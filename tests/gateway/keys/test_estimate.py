"""The estimate of a job's tokens."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sluice.gateway.caller import estimate

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
NAMES = st.sampled_from(["messages", "tools", "max_tokens", "max_completion_tokens", "response_format", "n"])


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def test_text_counts_a_token_for_four_characters_and_the_answer_its_limit() -> None:
    assert estimate({**user("x" * 400), "max_tokens": 7}) == 1 + 100 + 4 + 7  # role, text, marks, answer


def test_an_answer_without_a_limit_counts_what_a_worker_reserves_at_first() -> None:
    assert estimate(user("x" * 400)) - estimate({**user("x" * 400), "max_completion_tokens": 24}) == 1000


def test_the_inputs_of_embeddings_count_as_text_or_by_their_token_ids_and_have_no_answer() -> None:
    assert estimate({"input": ["x" * 400, "y" * 40]}, answers=False) == 110
    assert estimate({"input": [[5, 6, 7], [8]]}, answers=False) == 4


def test_an_image_counts_the_same_however_long_its_data_is() -> None:
    images = [user([{"type": "image_url", "image_url": {"url": "data:" + "A" * length}}]) for length in (8, 4_000_000)]
    assert estimate(images[0]) == estimate(images[1])


@given(st.dictionaries(NAMES, JSON))
def test_any_json_has_an_estimate(body: dict[str, Any]) -> None:
    assert estimate(body) >= 1
