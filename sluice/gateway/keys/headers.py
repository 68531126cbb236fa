"""The headers that report the limits of a key, as OpenAI and Anthropic name them."""

from datetime import UTC, datetime, timedelta

from sluice.gateway.keys.limits import Balance


def openai_headers(balance: Balance) -> dict[str, str]:
    """Return OpenAI's `x-ratelimit-*` headers for the limits that the key has."""
    headers = dict[str, str]()
    for name, limit, left, reset_s in _limits(balance):
        headers[f"x-ratelimit-limit-{name}"] = str(limit)
        headers[f"x-ratelimit-remaining-{name}"] = str(left)
        headers[f"x-ratelimit-reset-{name}"] = _duration(reset_s)
    return headers


def anthropic_headers(balance: Balance, now: datetime) -> dict[str, str]:
    """Return Anthropic's `anthropic-ratelimit-*` headers for the limits that the key has."""
    headers = dict[str, str]()
    for name, limit, left, reset_s in _limits(balance):
        reset_at = (now + timedelta(seconds=reset_s)).astimezone(UTC)
        headers[f"anthropic-ratelimit-{name}-limit"] = str(limit)
        headers[f"anthropic-ratelimit-{name}-remaining"] = str(left)
        headers[f"anthropic-ratelimit-{name}-reset"] = reset_at.strftime("%Y-%m-%dT%H:%M:%SZ")
    return headers


def _limits(balance: Balance) -> list[tuple[str, int, int, float]]:
    each = [
        ("requests", balance.requests_per_minute, balance.requests_left, balance.requests_reset_s),
        ("tokens", balance.tokens_per_minute, balance.tokens_left, balance.tokens_reset_s),
    ]
    return [(name, limit, left, reset_s) for name, limit, left, reset_s in each if limit is not None]


def _duration(seconds: float) -> str:
    """Return a duration in OpenAI's form: `120ms`, `7.66s`, `1m0s`."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{minutes:.0f}m{rest:.0f}s" if minutes else f"{rest:.2f}".rstrip("0").rstrip(".") + "s"
