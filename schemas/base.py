"""What every model of the contract has in common."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """What comes in: unknown names are refused, nothing is coerced ("1" is not 1)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Sent(BaseModel):
    """What goes out: a later worker may say more, so a reader must not refuse what it does not know."""

    model_config = ConfigDict(extra="allow", frozen=True)
