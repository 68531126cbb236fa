"""Base classes and common types of the contract's models."""

import sys
from math import isfinite
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator, with_config

# OpenAI accepts 16 pairs of 512 characters as metadata, and schemas of 5,000 properties and 120,000 characters.
MAX_VALUES = 30_000
MAX_CHARACTERS = 1_000_000


class Strict(BaseModel):
    """Base of incoming models: unknown names are refused, and nothing is coerced ("1" is not 1)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few_names(cls, value: object) -> object:
        """Limit the number of fields: reporting a megabyte of unknown names would block the event loop for seconds."""
        # The largest model has about thirty; each unknown name costs a microsecond and a kilobyte.
        if isinstance(value, dict) and len(value) > 1000:
            raise ValueError(f"has {len(value):,} fields; at most 1,000 are read")
        return value


class Sent(BaseModel):
    """Base of outgoing models. A later worker may send more fields, so readers must accept unknown ones.

    They describe what a worker sends, and it uses hardly any itself, so pydantic builds each at its first use.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False, defer_build=True)


def describe_types(*values: type) -> None:
    """Let pydantic read and describe plain dataclasses of `sluice.contract` as it does `Sent`. The texts below their
    fields become descriptions."""
    for value in values:
        with_config(ConfigDict(strict=True, allow_inf_nan=False, use_attribute_docstrings=True))(value)


def _check(value: dict[str, Any], max_values: int, max_characters: int) -> dict[str, Any]:
    """Check that the object can be written as JSON in UTF-8 and is not too large. Raises ValueError."""
    level = list[Any]([value])
    values = 0
    characters = 0
    max_levels = 64  # far more than a JSON schema has, far fewer than a JSON writer can nest
    for _ in range(max_levels):
        items = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]
        if any(isinstance(item, float) and not isfinite(item) for item in items):
            raise ValueError("holds a number that is not finite; send a number or null")
        names = [name for each in level if isinstance(each, dict) for name in each]
        texts = [item for item in items if isinstance(item, str)] + names
        values, characters = values + len(items), characters + sum(map(len, texts))
        if values > max_values:
            raise ValueError(f"holds more than {max_values:,} values; send fewer")
        if characters > max_characters:
            raise ValueError(f"holds more than {max_characters:,} characters; send fewer")
        if not all(map(_is_text, texts)):
            raise ValueError("holds half of a surrogate pair, which is no character; cut strings between characters")
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return value
    raise ValueError(f"is nested more than {max_levels} levels deep")


def _is_text(value: str) -> bool:
    """True if the string can be encoded in UTF-8. JSON can spell half of a surrogate pair, and Python accepts it."""
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bounded(value: dict[str, Any]) -> dict[str, Any]:
    return _check(value, MAX_VALUES, MAX_CHARACTERS)


def _writable(value: dict[str, Any]) -> dict[str, Any]:
    return _check(value, sys.maxsize, sys.maxsize)


TokenCount = Annotated[int, Field(ge=0)]
# An object that is passed on unchanged, so its size is limited here: metadata, schemas, template variables.
JsonObject = Annotated[dict[str, Any], AfterValidator(_bounded)]
# An object whose size is limited elsewhere.
AnyJsonObject = Annotated[dict[str, Any], AfterValidator(_writable)]
# Any constraint makes pydantic check the characters, so half of a surrogate pair is refused here.
Text = Annotated[str, Field(min_length=0)]
