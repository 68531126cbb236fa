"""The headers about limits, in the forms of OpenAI and Anthropic."""

from datetime import UTC, datetime

import pytest

from sluice.gateway.caller import Balance, anthropic_headers, openai_headers

NOW = datetime(2027, 1, 1, 12, 0, tzinfo=UTC)


def test_openai_s_headers_report_limit_rest_and_time_to_full() -> None:
    assert openai_headers(Balance(60, 6_000, 59, 0)) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m0s",
    }


@pytest.mark.parametrize(("left", "shown"), [(600, "0ms"), (599, "100ms"), (585, "1.5s"), (1, "59.9s"), (0, "1m0s")])
def test_openai_s_durations(left: int, shown: str) -> None:
    assert openai_headers(Balance(600, None, left, 0))["x-ratelimit-reset-requests"] == shown


def test_anthropic_s_headers_give_a_time() -> None:
    assert anthropic_headers(Balance(None, 6_000, 0, 5_000), NOW) == {
        "anthropic-ratelimit-tokens-limit": "6000",
        "anthropic-ratelimit-tokens-remaining": "5000",
        "anthropic-ratelimit-tokens-reset": "2027-01-01T12:00:10Z",
    }


def test_a_key_without_limits_has_no_headers() -> None:
    assert openai_headers(Balance(None, None, 0, 0)) == {}
