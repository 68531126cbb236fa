"""The request for embeddings: the body of OpenAI's, with a few additional fields."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from schemas.base import JsonObject, Strict
from schemas.chat import ServiceTier, TenantName
from schemas.messages import json_type
from sluice.contract.keys import MODEL_NAME


def _entry_type(value: object) -> str | None:
    return "integer" if type(value) is int else json_type(value)


InputText = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
_TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
_Entry = Annotated[
    Annotated[InputText, Tag("string")] | Annotated[TokenId, Tag("integer")] | Annotated[_TokenIds, Tag("array")],
    Discriminator(_entry_type, "wrong_type", "must be a string, a token id or a list of token ids"),
]
_Entries = Annotated[list[_Entry], Field(min_length=1, fail_fast=True)]
Inputs = Annotated[
    Annotated[InputText, Tag("string")] | Annotated[_Entries, Tag("array")],
    Discriminator(json_type, "wrong_type", "must be a string, or a list of strings, token ids or lists of token ids"),
]


class EmbeddingRequest(Strict):
    """The body of an embeddings request."""

    input: Inputs = Field(
        description="A text, a list of texts, the token ids of one input, or a list of such lists; up to 2,048 inputs."
    )
    model: Annotated[str, Field(pattern=f"^{MODEL_NAME}$")] | None = Field(
        default=None, description="The served name. Absent: this worker's."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="base64: of the numbers as little-endian float32. Absent: float."
    )
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="The first so many numbers of each vector, scaled to the length 1. Absent: all."
    )
    deadline_s: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Seconds from submission until the job fails with `deadline`."
    )
    on_disconnect: Literal["continue", "cancel"] | None = Field(
        default=None, description="Without effect: the job has no events that a reader could leave."
    )
    tenant: TenantName | None = Field(
        default=None, description="The job's tenant. Echoed. Absent: `safety_identifier`, else `user`."
    )
    safety_identifier: TenantName | None = Field(default=None, description="Echoed.")
    user: TenantName | None = Field(default=None, description="Echoed.")
    service_tier: ServiceTier | None = Field(
        default=None, description="Selects the lane in our client's submit: `flex` is the batch lane."
    )
    metadata: JsonObject | None = Field(default=None, description="Echoed.")

    @field_validator("input")
    @classmethod
    def _is_of_one_kind(cls, given: Inputs) -> Inputs:
        if isinstance(given, list):
            if len({type(entry) for entry in given}) > 1:
                raise ValueError("mixes strings, token ids and lists; send entries of one kind")
            most = 2048  # as OpenAI's
            if not isinstance(given[0], int) and len(given) > most:
                raise ValueError(f"has {len(given):,} entries; at most {most:,} are taken")
        return given

    @property
    def inputs(self) -> Sequence[str | list[int]]:
        """The inputs, each a text or the ids of its tokens."""
        if isinstance(self.input, str):
            return [self.input]
        ids = [each for each in self.input if isinstance(each, int)]
        return [ids] if ids else [each for each in self.input if not isinstance(each, int)]
