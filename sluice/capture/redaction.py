"""Takes the words out of a captured job and keeps its shape: structure, lengths, numbers of sampling, and seeds.

What is not known to be a word of the protocol is replaced, so a field that a later version adds is too.
"""

import json
import re
from collections import Counter
from dataclasses import replace
from typing import Any

from sluice.capture.file import CapturedJob

# Strings of the protocol, by the names of their fields.
_WORDS = {
    "role": "system developer user assistant tool function",
    "type": "text image_url function json_object json_schema content object array string number integer "
    "boolean null started progress delta resumed restarted finished failed cancelled invalid_request unsupported "
    "too_large overloaded deadline internal url",
    "object": "chat.completion list embedding token_count",
    "finish_reason": "stop length tool_calls",
    "phase": "waiting loading encoding scoring prefill",
    "tool_choice": "none auto required",
    "function_call": "none auto",
    "detail": "low high auto",
    "encoding_format": "float base64",
    "reasoning_effort": "none minimal low medium high xhigh max",
    "verbosity": "low medium high",
    "service_tier": "auto default flex scale priority fast",
    "on_disconnect": "continue cancel",
    "lane": "interactive batch",
    "reason": "requested",
    "format": "date date-time time duration ipv4 ipv6 uuid uri email hostname regex",
}
_KEPT = frozenset({"model", "fingerprint", "system_fingerprint", "worker", "$schema", "draft"})
_SENTENCES = frozenset({"message", "param", "warnings", "skipped", "repaired"})  # of ours, which quote
# The end of a sentence that a template or a grammar wrote, and what is in quotes: no apostrophe begins or ends it.
_FOREIGN = re.compile(r"(these messages: |schema cannot be enforced: )(.*)", re.DOTALL)
_QUOTED = re.compile(r"""(?<!\w)(['"`])(.*?)(\1(?!\w)|\Z)""", re.DOTALL)
_PERSONS = frozenset({"tenant", "user", "prompt_cache_key", "alias"})  # of a job's hash
# Whose numbers and names are the user's too.
_OWN = frozenset({"metadata", "arguments", "enum", "const", "default", "examples", "chat_template_kwargs", "input",
                  "embedding", "token_ids", "bytes"})  # fmt: skip
_NAMES = frozenset(
    """
messages role content text type image_url url detail name tool_calls tool_call_id id index function arguments reasoning
reasoning_content refusal function_call annotations audio provider_specific_fields model max_tokens
max_completion_tokens max_reasoning_tokens thinking_token_budget loop_guard temperature top_p top_k min_p
repetition_penalty presence_penalty frequency_penalty logit_bias ignore_eos seed stop logprobs top_logprobs
response_format tools tool_choice parallel_tool_calls functions reasoning_effort verbosity chat_template_kwargs
specprefill specprefill_keep_pct speculation prediction deadline_s on_disconnect tenant safety_identifier user
prompt_cache_key service_tier metadata store stream stream_options include_usage modalities n input encoding_format
dimensions json_schema schema strict description parameters
$schema $ref $defs $anchor definitions properties required additionalProperties items prefixItems minItems maxItems
minLength maxLength allOf anyOf oneOf not if then else enum const minimum maximum exclusiveMinimum exclusiveMaximum
multipleOf pattern format patternProperties propertyNames minProperties maxProperties dependentRequired
dependentSchemas contains uniqueItems title default examples
seq attempt ts fingerprint worker phase done total token_ids finish_reason stop_sequence usage timings warnings error
message param retryable reason prompt_tokens completion_tokens cached_tokens image_tokens kept_tokens reasoning_tokens
accepted_prediction_tokens rejected_prediction_tokens queue_s prefill_s ttft_s decode_s tokens_per_s load_s
object created system_fingerprint choices total_tokens prompt_tokens_details completion_tokens_details sluice lane
rows_mean token logprob bytes data embedding kept draft scoring_s skipped proposed accepted tokens_per_forward kinds
repaired workers
""".split()  # noqa: SIM905
)


def redacted(job: CapturedJob) -> CapturedJob:
    """Return the job without words. An equal name gets an equal one in the whole job, so that schemas, required
    properties and calls still fit."""
    words = _Words(kept=job.id)
    try:
        return replace(
            job,
            request=words.masked(job.request),
            body=_shape(job.body),
            stored={name: _shape(text) if name in _PERSONS else text for name, text in job.stored.items()},
            events=words.masked(job.events, ours=True),
            result=words.masked(job.result, ours=True),
        )
    except RecursionError:  # a request that is nested deeper than any worker accepts
        return replace(job, request=None, body="", stored={}, events=[], result=None)


class _Words:
    """Replaces words, and keeps for one job what stands for its names."""

    def __init__(self, kept: str) -> None:
        """`kept`: a name that stays."""
        self._names = {kept: kept}
        self._taken = {kept}
        self._counts = Counter[str]()
        self._ours = False

    def masked(self, value: Any, *, ours: bool = False) -> Any:
        """Return a JSON value without words. `ours`: a worker wrote it, so its errors are sentences of the worker."""
        self._ours = ours
        return self._masked(value, "", own=False)

    def _masked(self, value: Any, name: str, *, own: bool) -> Any:
        """`name`: of the field that holds it. `own`: it is in one of `_OWN`."""
        match value:
            case dict():
                return {self._key(key, own): self._masked(each, key, own=own or key in _OWN)
                        for key, each in value.items()}  # fmt: skip
            case list():
                return [self._masked(each, name, own=own) for each in value]
            case str():
                return self._text(value, name, own)
            case bool() | None:
                return value
        return 0 if own else value

    def _key(self, key: str, own: bool) -> str:
        return key if key in _NAMES and not own else self._name(key)

    def _name(self, name: str) -> str:
        """Return what stands for a name: of its shape, and for no other name."""
        if name not in self._names:
            shape = stands = _shape(name)
            while stands in self._taken:
                self._counts[shape] += 1
                stands = f"{shape}{self._counts[shape]}"
            self._names[name] = stands
            self._taken.add(stands)
        return self._names[name]

    def _text(self, text: str, name: str, own: bool) -> str:
        if not own and (text in _WORDS.get(name, "").split() or name in _KEPT):
            return text
        match name:
            case "url" | "image_url":
                return f"[redacted: {len(text)} characters]"
            case "$ref":
                return "/".join(each if each in _NAMES | {"#"} else self._name(each) for each in text.split("/"))
            case "arguments":
                return self._json(text)
            case "id" | "name" | "required" | "enum" | "const" | "tool_call_id":
                return self._name(text)
        return self._sentence(text) if self._ours and not own and name in _SENTENCES else _shape(text)

    def _sentence(self, text: str) -> str:
        """Replace what a sentence quotes, which may be cut, and the names in it that were replaced elsewhere."""
        text = _FOREIGN.sub(lambda match: f"{match[1]}{_shape(match[2])}", text)
        quoted = _QUOTED.sub(lambda match: f"{match[1]}{_shape(match[2])}{match[3]}", text)
        return re.sub(r"[\w-]+", lambda match: self._names.get(match[0], match[0]), quoted)

    def _json(self, text: str) -> str:
        try:
            return json.dumps(self._masked(json.loads(text), "", own=True))
        except ValueError:
            return _shape(text)  # a fragment of a call, or no JSON


def _shape(text: str) -> str:
    """Return the text with x for each letter and other character beyond ASCII, and 1 for each digit; white space and
    punctuation stay."""
    return re.sub(r"[^\W\d_]|[^\x00-\x7f]", "x", re.sub(r"\d", "1", text))
