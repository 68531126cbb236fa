"""What every model of the contract has in common."""

import sys
from math import isfinite
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

_MOST_NAMES = 1000  # an object of ours has some thirty; each wrong name costs a microsecond and a kilobyte
# OpenAI takes 16 pairs of 512 characters as metadata, and schemas of 5,000 properties and 120,000 characters.
MOST_VALUES = 30_000
MOST_CHARACTERS = 1_000_000
_MOST_LEVELS = 64  # far more than a JSON schema has, far less than makes a JSON writer give up


class Strict(BaseModel):
    """What comes in: unknown names are refused, nothing is coerced ("1" is not 1)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few_names(cls, value: object) -> object:
        """To report a megabyte of wrong names would keep the event loop busy for seconds."""
        if isinstance(value, dict) and len(value) > _MOST_NAMES:
            raise ValueError(f"has {len(value):,} fields; at most {_MOST_NAMES:,} are read")
        return value


class Sent(BaseModel):
    """What goes out: a later worker may say more, so a reader must not refuse what it does not know."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)


def _check(value: dict[str, Any], most_values: int, most_characters: int) -> dict[str, Any]:
    """Raises ValueError for what cannot be written again, as JSON in UTF-8, or what would take long to."""
    level, values, characters = list[Any]([value]), 0, 0
    for _ in range(_MOST_LEVELS):
        items = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]
        if any(isinstance(item, float) and not isfinite(item) for item in items):
            raise ValueError("holds a number that is not finite; send a number or null")
        names = [name for each in level if isinstance(each, dict) for name in each]
        texts = [item for item in items if isinstance(item, str)] + names
        values, characters = values + len(items), characters + sum(map(len, texts))
        if values > most_values:
            raise ValueError(f"holds more than {most_values:,} values; send fewer")
        if characters > most_characters:
            raise ValueError(f"holds more than {most_characters:,} characters; send fewer")
        if not all(map(_is_text, texts)):
            raise ValueError("holds half of a surrogate pair, which is no character; cut strings between characters")
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return value
    raise ValueError(f"is nested more than {_MOST_LEVELS} levels deep")


def _is_text(value: str) -> bool:
    """Whether UTF-8 has bytes for it. JSON can spell half of a surrogate pair, and Python reads it."""
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bounded(value: dict[str, Any]) -> dict[str, Any]:
    return _check(value, MOST_VALUES, MOST_CHARACTERS)


def _writable(value: dict[str, Any]) -> dict[str, Any]:
    return _check(value, sys.maxsize, sys.maxsize)


# What goes on to others as it is, so its size has a bound of its own: metadata, schemas, a template's variables.
JsonObject = Annotated[dict[str, Any], AfterValidator(_bounded)]
# What has a bound elsewhere.
AnyJsonObject = Annotated[dict[str, Any], AfterValidator(_writable)]
# Any constraint makes pydantic look at the characters: half of a surrogate pair is refused, not tokenized.
Text = Annotated[str, Field(min_length=0)]
