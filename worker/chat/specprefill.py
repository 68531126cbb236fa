"""Decides for a job if SpecPrefill applies to its prompt, and reports the outcome in its result."""

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import isfinite
from pathlib import PurePath
from typing import Any

from schemas import ChatRequest
from schemas.chat import JsonObjectFormat, JsonSchemaFormat
from schemas.messages import TextPart
from worker.schedule.outcomes import SpecPrefillApplied, SpecPrefillSkipped
from worker.schedule.request import Range, SpecPrefillParams, tokens_in
from worker.settings import Settings
from worker.text.prompt.prompt import Prompt

_MOSTLY_CODE = 0.5  # share of the conversation's characters in code fences: an edit needs every line


@dataclass(slots=True)
class SpecPrefillReport:
    """The prompt tokens that were kept, or why all were. Empty if SpecPrefill is off, or if the prompt is short."""

    draft: str = ""
    why_whole: str = ""
    kept: tuple[Range, ...] | None = None
    scoring_s: float = 0.0

    @property
    def kept_tokens(self) -> int | None:
        """Number of prompt tokens that were kept; None if the prompt was computed whole."""
        return None if self.kept is None else tokens_in(self.kept)

    def record(self, outcome: SpecPrefillApplied | SpecPrefillSkipped) -> None:
        """Record the engine's outcome."""
        match outcome:
            case SpecPrefillApplied(kept_ranges=kept, seconds=seconds):
                self.kept, self.scoring_s = kept, seconds
            case SpecPrefillSkipped(reason=why):
                self.kept, self.why_whole = None, why

    def as_result(self, prompt_tokens: int, prefill_s: float) -> dict[str, Any] | None:
        """Return the report for the stored result. `prefill_s`: the whole prefill time, scoring included."""
        if self.kept_tokens is not None:
            times = {"scoring_s": round(self.scoring_s, 6), "prefill_s": round(max(0.0, prefill_s - self.scoring_s), 6)}
            return {"kept": round(self.kept_tokens / prompt_tokens, 4), "draft": self.draft, **times}
        return {"skipped": self.why_whole} if self.why_whole else None


def specprefill_params(
    request: ChatRequest, prompt: Prompt, settings: Settings
) -> tuple[SpecPrefillParams | None, SpecPrefillReport]:
    """Decide by the request's field, else by the worker's settings. Returns None to compute the whole prompt."""
    if settings.specprefill_draft_model is None or request.specprefill is False:
        return None, SpecPrefillReport()
    report = SpecPrefillReport(PurePath(settings.specprefill_draft_model).name)
    asked, tokens = request.specprefill or False, len(prompt.tokens)
    if not asked and tokens < settings.specprefill_threshold:
        return None, report
    report.why_whole = _why_whole(request, prompt, settings, asked=asked)
    if report.why_whole:
        return None, report
    keep = request.specprefill_keep_pct or settings.specprefill_keep_pct
    return SpecPrefillParams(
        keep, prompt.droppable_ranges, 1 if asked else settings.specprefill_threshold, asked
    ), report


def _why_whole(request: ChatRequest, prompt: Prompt, settings: Settings, *, asked: bool) -> str:
    limit = settings.specprefill_max_tokens
    if len(prompt.tokens) > limit:
        return f"The prompt has {len(prompt.tokens):,} tokens, and prompts are scored up to {limit:,}."
    if not prompt.droppable_ranges:
        return "The prompt has no long text from which tokens could be dropped."
    if asked:
        return ""
    if request.offered_tools:
        return "The request offers tools; `specprefill: true` asks for it."
    if isinstance(request.response_format, JsonObjectFormat | JsonSchemaFormat):
        return "The request asks for JSON; `specprefill: true` asks for it."
    if _code_share(request) > _MOSTLY_CODE:
        return "The prompt is mostly code; `specprefill: true` asks for it."
    return ""


def _code_share(request: ChatRequest) -> float:
    """Return the share of the conversation's characters that is within code fences."""
    texts = [text for message in request.messages for text in _texts(message.content)]
    code = sum(len(piece) for text in texts for piece in text.split("```")[1::2])
    return code / max(1, sum(map(len, texts)))


def _texts(content: str | list[Any] | None) -> list[str]:
    if isinstance(content, list):
        return [part.text for part in content if isinstance(part, TextPart)]
    return [content or ""]


# Between the attempts at a job


def dump_report(report: SpecPrefillReport, fingerprint: str) -> str:
    """Serialize the report for the job's hash: a new attempt must drop the same tokens to continue exactly."""
    return json.dumps({"fingerprint": fingerprint, **asdict(report)}, separators=(",", ":"))


def load_report(stored: bytes, fingerprint: str, prompt_tokens: int) -> SpecPrefillReport | None:
    """Load a stored report. Returns None if there is none, if it is of another model, or if it is invalid."""
    try:
        earlier = json.loads(stored or b"{}")
        if earlier.pop("fingerprint", None) != fingerprint:
            return None
        kept = earlier.pop("kept")
        ranges = None if kept is None else tuple((int(start), int(end)) for start, end in kept)
        report = SpecPrefillReport(**earlier, kept=ranges)
        return report if _is_valid(report) and (ranges is None or _fits(ranges, prompt_tokens)) else None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _is_valid(report: SpecPrefillReport) -> bool:
    """True if the values that go into the result have their types."""
    texts = isinstance(report.draft, str) and isinstance(report.why_whole, str)
    return texts and isinstance(report.scoring_s, int | float) and isfinite(report.scoring_s)


def _fits(ranges: tuple[Range, ...], prompt_tokens: int) -> bool:
    """True if the ranges are in order, separate, and end at the prompt's end."""
    edges = [edge for span in ranges for edge in span]
    return all(one < other for one, other in pairwise([-1, *edges])) and edges[-1:] == [prompt_tokens]
