"""The fields, `null` included, that OpenAI's OpenAPI description requires of what the gateway sends. The SDK's types do
not require those that may be null. Names alone, read from the description of November 2026."""

from collections.abc import Iterator

_USAGE = "completion_tokens prompt_tokens total_tokens"
_RESPONSE = (  # and what Open Responses requires besides
    "created_at error id incomplete_details instructions metadata model object output parallel_tool_calls temperature "
    "tool_choice tools top_p completed_at status previous_response_id truncation text presence_penalty "
    "frequency_penalty top_logprobs reasoning usage max_output_tokens max_tool_calls store background service_tier "
    "safety_identifier prompt_cache_key"
)
_OF_ITEM = "item_id output_index sequence_number type"

# By `object`, and below it by the names of fields.
OBJECTS = {
    "chat.completion": "choices created id model object",
    "chat.completion.choices": "finish_reason index logprobs message",
    "chat.completion.choices.message": "content refusal role",
    "chat.completion.choices.message.tool_calls": "function id type",
    "chat.completion.choices.logprobs": "content refusal",
    "chat.completion.choices.logprobs.content": "bytes logprob token top_logprobs",
    "chat.completion.usage": _USAGE,
    "chat.completion.chunk": "choices created id model object",
    "chat.completion.chunk.choices": "delta finish_reason index",
    "chat.completion.chunk.choices.delta.tool_calls": "index",
    "chat.completion.chunk.choices.logprobs": "content refusal",
    "chat.completion.chunk.choices.logprobs.content": "bytes logprob token top_logprobs",
    "chat.completion.chunk.usage": _USAGE,
    "response": _RESPONSE,
    "response.error": "code message",
    "response.usage": "input_tokens input_tokens_details output_tokens output_tokens_details total_tokens",
    "response.usage.input_tokens_details": "cached_tokens cache_write_tokens",
    "response.usage.output_tokens_details": "reasoning_tokens",
    "response.tools": "type",
    "list": "data object",
    "model": "created id object owned_by",
}
# By `type`.
TYPES = {
    "message": "content id role status type",
    "output_text": "annotations logprobs text type",
    "output_text.logprobs": "bytes logprob token top_logprobs",
    "output_text.logprobs.top_logprobs": "bytes logprob token",
    "reasoning": "id summary type",
    "reasoning_text": "text type",
    "summary_text": "text type",
    "function_call": "arguments call_id name type",
    "custom_tool_call": "call_id input name type",
    "response.created": "response sequence_number type",
    "response.queued": "response sequence_number type",
    "response.in_progress": "response sequence_number type",
    "response.completed": "response sequence_number type",
    "response.incomplete": "response sequence_number type",
    "response.failed": "response sequence_number type",
    "response.output_item.added": "item output_index sequence_number type",
    "response.output_item.done": "item output_index sequence_number type",
    "response.content_part.added": f"content_index part {_OF_ITEM}",
    "response.content_part.done": f"content_index part {_OF_ITEM}",
    "response.output_text.delta": f"content_index delta logprobs {_OF_ITEM}",
    "response.output_text.done": f"content_index logprobs text {_OF_ITEM}",
    "response.reasoning_text.delta": f"content_index delta {_OF_ITEM}",
    "response.reasoning_text.done": f"content_index text {_OF_ITEM}",
    "response.reasoning_summary_part.added": f"part summary_index {_OF_ITEM}",
    "response.reasoning_summary_part.done": f"part summary_index {_OF_ITEM}",
    "response.reasoning_summary_text.delta": f"delta summary_index {_OF_ITEM}",
    "response.reasoning_summary_text.done": f"summary_index text {_OF_ITEM}",
    "response.function_call_arguments.delta": f"delta {_OF_ITEM}",
    "response.function_call_arguments.done": f"arguments name {_OF_ITEM}",
    "response.custom_tool_call_input.delta": f"delta {_OF_ITEM}",
    "response.custom_tool_call_input.done": f"input {_OF_ITEM}",
    "error": "code message param sequence_number type",
}
ERROR = "code message param type"


def lacking(value: object, place: str = "") -> Iterator[str]:
    """Yield the fields that OpenAI's description requires and the answer or event lacks."""
    if isinstance(value, list):
        for each in value:
            yield from lacking(each, place)
    if isinstance(value, dict):
        kind, sort = value.get("object"), value.get("type")
        place = kind if kind in OBJECTS else place
        place = sort if sort in TYPES else place
        required = {**OBJECTS, **TYPES}.get(place, "").split()
        yield from (f"{place}.{name}" for name in required if name not in value)
        for name, each in value.items():
            yield from lacking(each, f"{place}.{name}")
