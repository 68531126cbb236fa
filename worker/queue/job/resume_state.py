"""What an attempt at a job leaves for the next one, in fields of the job's hash."""

from collections.abc import Mapping
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from worker.request import Range, tokens_in


class SpecPrefillReport(BaseModel):
    """The prompt tokens that were kept, or why all were. Without both, SpecPrefill is off or the prompt is short."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    kept: tuple[Range, ...] | None  # None if all were
    draft: str = ""
    why_whole: str = ""
    scoring_s: float = 0.0
    fingerprint: str = ""  # of the model for which it was decided; empty before

    @property
    def kept_tokens(self) -> int | None:
        """Number of prompt tokens that were kept; None if the prompt was computed whole."""
        return None if self.kept is None else tokens_in(self.kept)


class ResumeState(BaseModel):
    """What a new attempt needs, in addition to the delivered events, to continue the answer of earlier attempts.

    Each member is a field of the job's hash. Workers of other versions read and write them too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    fingerprint: str = ""  # of the model; empty if no attempt has begun
    seed: int | None = None
    images: str = ""  # digest of the images; empty without images
    specprefill: SpecPrefillReport | None = None  # None before it is decided, and if there is nothing to decide

    @field_validator("specprefill", mode="before")
    @classmethod
    def _read_report(cls, stored: object) -> object:
        return SpecPrefillReport.model_validate_json(stored) if isinstance(stored, bytes) else stored

    @property
    def kept_ranges(self) -> tuple[Range, ...] | None:
        """Ranges of the prompt that are computed; None for the whole prompt, or if it is not decided."""
        return self.specprefill.kept if self.specprefill else None

    @classmethod
    def load(cls, fields: Mapping[str, bytes | None]) -> Self | None:
        """Read the fields of the job's hash; an empty field is the same as none. Returns None if another program wrote
        one of them."""
        try:
            return cls.model_validate({name: value for name, value in fields.items() if value})
        except ValidationError:
            return None

    def as_fields(self) -> dict[str, str | int]:
        """Return the fields to store. Without a report its field is empty, which clears that of an earlier answer."""
        report = self.specprefill.model_dump_json() if self.specprefill else ""
        return self.model_dump(exclude={"specprefill"}, exclude_none=True) | {"specprefill": report}
