"""What every model of the contract has in common."""

from math import isfinite
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

_MOST_NAMES = 1000  # an object of ours has some thirty; each wrong name costs a microsecond and a kilobyte
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


def _writable(value: dict[str, Any]) -> dict[str, Any]:
    """Some of these objects are written again, and 1e999, which is JSON, reads as infinity, which is not."""
    level: list[Any] = [value]
    for _ in range(_MOST_LEVELS):
        items = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]
        if any(isinstance(item, float) and not isfinite(item) for item in items):
            raise ValueError("holds a number that is not finite")
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return value
    raise ValueError(f"is nested more than {_MOST_LEVELS} levels deep")


JsonObject = Annotated[dict[str, Any], AfterValidator(_writable)]
# Any constraint makes pydantic look at the characters: half of a surrogate pair is refused, not tokenized.
Text = Annotated[str, Field(min_length=0)]
