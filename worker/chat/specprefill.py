"""Decides for a job if SpecPrefill applies to its prompt, and reports the decision in its result."""

from itertools import pairwise
from pathlib import PurePath
from typing import Any

from schemas import ChatRequest
from schemas.chat import JsonObjectFormat, JsonSchemaFormat
from schemas.messages import TextPart
from worker.outcomes import SpecPrefillApplied, SpecPrefillSkipped
from worker.queue.job.resume_state import SpecPrefillReport
from worker.request import SpecPrefillParams
from worker.settings import Settings
from worker.text.prompt.prompt import Prompt


def specprefill_params(
    request: ChatRequest, prompt: Prompt, settings: Settings
) -> tuple[SpecPrefillParams | None, SpecPrefillReport]:
    """Decide by the request's field, else by the worker's settings. Returns None to compute the whole prompt."""
    if settings.specprefill_draft_model is None or request.specprefill is False:
        return None, SpecPrefillReport(kept=None)
    draft = PurePath(settings.specprefill_draft_model).name
    asked, tokens = request.specprefill or False, len(prompt.tokens)
    if not asked and tokens < settings.specprefill_threshold:
        return None, SpecPrefillReport(kept=None, draft=draft)
    if why_whole := _why_whole(request, prompt, settings, asked=asked):
        return None, SpecPrefillReport(kept=None, draft=draft, why_whole=why_whole)
    keep = request.specprefill_keep_pct or settings.specprefill_keep_pct
    min_tokens = 1 if asked else settings.specprefill_threshold
    params = SpecPrefillParams(keep, prompt.droppable_ranges, min_tokens, asked)
    return params, SpecPrefillReport(kept=None, draft=draft)


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
    if _code_share(request) > 0.5:  # an edit needs every line
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


def with_outcome(
    report: SpecPrefillReport, outcome: SpecPrefillApplied | SpecPrefillSkipped, fingerprint: str
) -> SpecPrefillReport:
    """Return the report with the engine's decision. `fingerprint`: the model's."""
    match outcome:
        case SpecPrefillApplied(kept_ranges=kept, seconds=seconds):
            decided: dict[str, Any] = {"kept": kept, "scoring_s": seconds}
        case SpecPrefillSkipped(reason=why):
            decided = {"kept": None, "why_whole": why}
    return report.model_copy(update={**decided, "fingerprint": fingerprint})


def as_result(report: SpecPrefillReport, prompt_tokens: int, prefill_s: float) -> dict[str, Any] | None:
    """Return the report for the stored result. `prefill_s`: the whole prefill time, scoring included."""
    if report.kept_tokens is not None:
        times = {"scoring_s": round(report.scoring_s, 6), "prefill_s": round(max(0.0, prefill_s - report.scoring_s), 6)}
        return {"kept": round(report.kept_tokens / prompt_tokens, 4), "draft": report.draft, **times}
    return {"skipped": report.why_whole} if report.why_whole else None


def applies_to(report: SpecPrefillReport, fingerprint: str, prompt_tokens: int) -> bool:
    """True if an earlier decision holds for this model and for a prompt of this length: kept ranges are in order,
    separate, and end at the prompt's end."""
    if report.fingerprint != fingerprint:
        return False
    if report.kept is None:
        return True
    edges = [edge for span in report.kept for edge in span]
    return all(one < other for one, other in pairwise([-1, *edges])) and edges[-1:] == [prompt_tokens]
