"""Valid and invalid requests."""

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
LOOK: dict[str, Any] = {"type": "function", "function": {"name": "look"}}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
}
CALL: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Ulm"}'},
}
PNG = "data:image/png;base64,iVBORw0KGgo="


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, **fields}


def user(*parts: Any) -> dict[str, Any]:
    """Return a body with one message of these parts."""
    return {"messages": [{"role": "user", "content": list(parts)}]}


# Every field at once, every role, every kind of part.
FULL: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief.", "name": "ops"},
        {"role": "developer", "content": [{"type": "text", "text": "In English."}]},
        {
            "role": "user",
            "name": "Ada",
            "content": [
                {"type": "text", "text": "What is this?"},
                {"type": "image_url", "image_url": {"url": PNG, "detail": "low"}},
            ],
        },
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "Ask.", "refusal": None},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
        {"role": "assistant", "content": "It rains.", "reasoning_content": "Wet."},
    ],
    "model": "qwen3-4b_8bit.v2",
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "max_reasoning_tokens": 0,
    "thinking_token_budget": 0,
    "loop_guard": False,
    "stop": ["END", "\n\n"],
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": -2,
    "frequency_penalty": 2.0,
    "logit_bias": {"12": -100, "999999999": 5.5},
    "ignore_eos": True,
    "seed": -(2**63),
    "logprobs": True,
    "top_logprobs": 20,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "answer", "description": "d", "schema": {"type": "object"}, "strict": True},
    },
    "tools": [WEATHER, LOOK],
    "tool_choice": {"type": "function", "function": {"name": "look"}},
    "parallel_tool_calls": False,
    "functions": None,
    "function_call": None,
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "low",
    "verbosity": "high",
    "specprefill": True,
    "specprefill_keep_pct": 0.3,
    "speculation": {"max_tokens": 3},
    "prediction": {"type": "content", "content": [{"type": "text", "text": "def f():"}]},
    "deadline_s": 30,
    "on_disconnect": "cancel",
    "tenant": "acme",
    "safety_identifier": "u-17",
    "user": "ada",
    "prompt_cache_key": "session-9",
    "service_tier": "flex",
    "metadata": {"chat": 7, "tags": ["a", {"b": None}]},
    "store": True,
    "stream": True,
    "stream_options": {"include_usage": True, "include_obfuscation": False, "continuous_usage_stats": True},
    "modalities": ["text"],
    "audio": None,
    "web_search_options": None,
    "n": 1,
}

ACCEPTED: dict[str, dict[str, Any]] = {
    "messages alone": chat(),
    "every field": FULL,
    "a stop string": chat(stop="END"),
    "sixteen stop strings": chat(stop=[str(i) for i in range(16)]),
    "no stop strings": chat(stop=[]),
    "a stop string of 1,024 characters": chat(stop="🙂" * 1024),
    "whole numbers where fractions may be": chat(temperature=0, top_p=1, min_p=0, repetition_penalty=10),
    "the far ends": chat(temperature=2, min_p=1, presence_penalty=2, frequency_penalty=-2, top_k=0, top_logprobs=0),
    "an absurd limit": chat(max_tokens=10**12),
    "the largest seed": chat(seed=2**63 - 1),
    "a limit by its newer name": chat(max_completion_tokens=1),
    "a budget of reasoning": chat(max_reasoning_tokens=4096),
    "a budget of reasoning by vLLM's name": chat(thinking_token_budget=4096),
    "text format": chat(response_format={"type": "text"}),
    "any JSON": chat(response_format={"type": "json_object"}),
    "a schema without the schema": chat(response_format={"type": "json_schema", "json_schema": {"name": "a"}}),
    "no tools": chat(tools=[], tool_choice="none"),
    "tools with auto": chat(tools=[LOOK], tool_choice="auto"),
    "tools with required": chat(tools=[LOOK], tool_choice="required"),
    "a tool without parameters": chat(tools=[LOOK]),
    "the least to keep": chat(specprefill_keep_pct=0.1),
    "drafts": chat(speculation=True),
    "no drafts": chat(speculation=False),
    "no drafts by their length": chat(speculation={"max_tokens": 0}),
    "the longest drafts": chat(speculation={"max_tokens": 7}),
    "a predicted text": chat(prediction={"type": "content", "content": "1 2 3"}),
    "all to keep": chat(specprefill_keep_pct=1),
    "a short deadline": chat(deadline_s=0.001),
    "an empty content": {"messages": [{"role": "user", "content": ""}]},
    "no parts": user(),
    "an emoji": {"messages": [{"role": "user", "content": "\U0001f600"}]},
    "an image by address": user({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}),
    "a tool call as it was streamed": {
        "messages": [*HELLO, {"role": "assistant", "tool_calls": [{**CALL, "index": 0}]}]
    },
    "an answer of OpenAI's library": {
        "messages": [
            {"role": "assistant", "content": "Hi", "refusal": None}
            | {"annotations": None, "audio": None, "function_call": None, "tool_calls": None}
        ]
    },
    "an answer of LiteLLM": {
        "messages": [{"role": "assistant", "content": "Hi", "provider_specific_fields": {"refusal": None}}]
    },
    "an answer with no annotations": {"messages": [{"role": "assistant", "content": "Hi", "annotations": []}]},
    "functions": chat(functions=[LOOK["function"]], function_call={"name": "look"}),
    "functions with auto": chat(functions=[LOOK["function"]], function_call="auto"),
    "a call and its result in the older form": {
        "messages": [
            *HELLO,
            {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}},
            {"role": "function", "name": "look", "content": "Rain."},
        ]
    },
    "a result of nothing in the older form": {"messages": [{"role": "function", "name": "look", "content": None}]},
    "an effort in both places": chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "low"}),
    **{f"the tier {tier}": chat(service_tier=tier) for tier in ("auto", "default", "scale", "priority", "fast")},
    "metadata of sixty-four levels": chat(metadata=json.loads('{"a":' * 64 + "1" + "}" * 64)),
}

ROLES = "'system', 'developer', 'user', 'assistant', 'tool' or 'function'"
# The whole sentence each of these gets.
REFUSED: dict[str, tuple[Any, str]] = {
    "nothing": ({}, "messages is missing."),
    "a string": ("hello", "the request must be an object, not a string."),
    "null": (None, "the request must be an object, not null."),
    "a list": ([HELLO], "the request must be an object, not a list."),
    "a number": (3, "the request must be an object, not 3."),
    "no messages": ({"messages": []}, "messages must not be empty."),
    "null messages": ({"messages": None}, "messages must be a list, not null."),
    "one message, not a list": ({"messages": HELLO[0]}, "messages must be a list, not an object."),
    "a prompt": ({"messages": "Hello"}, "messages must be a list, not a string."),
    "messages of strings": ({"messages": ["Hello"]}, "messages[0] must be an object, not a string."),
    "a robot": (
        {"messages": [*HELLO, {"role": "robot", "content": "x"}]},
        f"messages[1].role: 'robot' is not supported; use {ROLES}.",
    ),
    "a role of null": ({"messages": [{"role": None}]}, f"messages[0].role: null is not supported; use {ROLES}."),
    "a role of a list": ({"messages": [{"role": [1]}]}, f"messages[0].role: a list is not supported; use {ROLES}."),
    "no role": ({"messages": [{"content": "x"}]}, "messages[0].role is missing."),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content is missing."),
    "null content": (
        {"messages": [{"role": "user", "content": None}]},
        "messages[0].content must be a string or a list of parts, not null.",
    ),
    "an object as content": (
        {"messages": [{"role": "system", "content": {}}]},
        "messages[0].content must be a string or a list of parts, not an object.",
    ),
    "a string as part": (user("x"), "messages[0].content[0] must be an object, not a string."),
    "a video": (
        user({"type": "text", "text": "What?"}, {"type": "video_url", "video_url": {"url": "x"}}),
        "messages[0].content[1].type: 'video_url' is not supported; use 'text' or 'image_url'.",
    ),
    "audio": (
        user({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}),
        "messages[0].content[0].type: 'input_audio' is not supported; use 'text' or 'image_url'.",
    ),
    "an image in a system message": (
        {"messages": [{"role": "system", "content": [{"type": "image_url", "image_url": {"url": PNG}}]}]},
        "messages[0].content[0].type: 'image_url' is not supported; use 'text'.",
    ),
    "an image without an address": (
        user({"type": "image_url", "image_url": {"url": ""}}),
        "messages[0].content[0].image_url.url must not be empty.",
    ),
    "an odd detail": (
        user({"type": "image_url", "image_url": {"url": PNG, "detail": "huge"}}),
        "messages[0].content[0].image_url.detail: 'huge' is not supported; use 'auto', 'low' or 'high'.",
    ),
    "a misspelt part": (
        user({"type": "text", "txt": "x"}),
        "messages[0].content[0].text is missing. "
        "messages[0].content[0].txt: unknown field; did you mean text?",
    ),
    "a misspelt message": (
        {"messages": [{"role": "user", "contents": "x"}]},
        "messages[0].content is missing. messages[0].contents: unknown field; did you mean content?",
    ),
    "an answer with audio": (
        {"messages": [{"role": "assistant", "content": "x", "audio": {"id": "a"}}]},
        "messages[0].audio is not supported; leave it out.",
    ),
    "a tool's answer to nothing": (
        {"messages": [{"role": "tool", "content": "x"}]},
        "messages[0].tool_call_id is missing.",
    ),
    "arguments that are no text": (
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "a", "arguments": {}}}]}]},
        "messages[0].tool_calls[0].function.arguments must be a string, not an object.",
    ),
    "half an emoji": (
        {"messages": [{"role": "user", "content": "a\ud83d"}]},
        r"messages[0].content holds half of a surrogate pair, which is no character: 'a\ud83d'.",
    ),
    "half an emoji in a part": (
        user({"type": "text", "text": "\ude00"}),
        r"messages[0].content[0].text holds half of a surrogate pair, which is no character: '\ude00'.",
    ),
    "half an emoji in a name": (
        chat(**{"a\ud83d": 1}),
        r"the request holds half of a surrogate pair, which is no character: 'a\ud83d'.",
    ),
    "half an emoji as role": (
        {"messages": [{"role": "\ud83d"}]},
        rf"messages[0].role: '\ud83d' is not supported; use {ROLES}.",
    ),
    "a misspelt field": (chat(max_token=5), "max_token: unknown field; did you mean max_tokens?"),
    "a field in another case": (chat(topP=0.5), "topP: unknown field; did you mean top_p?"),
    "a field in capitals": (chat(TEMPERATURE=1), "TEMPERATURE: unknown field; did you mean temperature?"),
    "a field of nobody's": (chat(zzz=5), "zzz: unknown field; leave it out."),
    "a field with a line break": (chat(**{"a\nb c": 5}), r"'a\nb c': unknown field; leave it out."),
    "a field without a name": (chat(**{"": 5}), "'': unknown field; leave it out."),
    "a long field": (chat(**{"k" * 99: 5}), f"'{'k' * 35}...': unknown field; leave it out."),
    "too many fields": (
        chat(**{f"k{i}": i for i in range(2000)}),
        "the request has 2,001 fields; at most 1,000 are read.",
    ),
    "a bad name": (
        chat(model="org/model"),
        "model: 'org/model' does not match ^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$.",
    ),
    "no tokens": (chat(max_tokens=0), "max_tokens: 0 is too small; the least is 1."),
    "half a token": (chat(max_tokens=0.5), "max_tokens must be a whole number, not 0.5."),
    "a whole number with a fraction": (chat(max_tokens=5.0), "max_tokens must be a whole number, not 5.0."),
    "a limit of true": (chat(max_tokens=True), "max_tokens must be a whole number, not true."),
    "two limits": (
        chat(max_tokens=5, max_completion_tokens=6),
        "max_tokens and max_completion_tokens differ; send one of them.",
    ),
    "a budget below nothing": (
        chat(max_reasoning_tokens=-1),
        "max_reasoning_tokens: -1 is too small; the least is 0.",
    ),
    "two budgets": (
        chat(max_reasoning_tokens=5, thinking_token_budget=6),
        "max_reasoning_tokens and thinking_token_budget differ; send one of them.",
    ),
    "hot": (chat(temperature=5), "temperature: 5 is too large; the most is 2."),
    "cold": (chat(temperature=-0.1), "temperature: -0.1 is too small; the least is 0."),
    "a word for a number": (chat(temperature="hot"), "temperature must be a number, not a string."),
    "a temperature of true": (chat(temperature=True), "temperature must be a number, not true."),
    "infinitely hot": (chat(temperature=float("inf")), "temperature must be a finite number, not Infinity."),
    "no number": (chat(top_p=float("nan")), "top_p must be a finite number, not NaN."),
    "hot beyond any float": (chat(deadline_s=10**400), "deadline_s: a number of some 401 digits is too large."),
    "nothing to choose from": (chat(top_p=0), "top_p: 0 is too small; it must be more than 0."),
    "a negative count": (chat(top_k=-1), "top_k: -1 is too small; the least is 0."),
    "more than all": (chat(min_p=1.5), "min_p: 1.5 is too large; the most is 1."),
    "no repetition at all": (chat(repetition_penalty=0), "repetition_penalty: 0 is too small; it must be more than 0."),
    "a heavy penalty": (chat(presence_penalty=2.5), "presence_penalty: 2.5 is too large; the most is 2."),
    "a bias on a word": (chat(logit_bias={"the": 1}), "logit_bias: 'the' does not match ^[0-9]{1,9}$."),
    "a bias on a word of pydantic's": (
        chat(logit_bias={"[key]": 1}),
        "logit_bias: '[key]' does not match ^[0-9]{1,9}$.",
    ),
    "a field of pydantic's": (chat(**{"[key]": 1}), "'[key]': unknown field; leave it out."),
    "a field of pydantic's in a message": (
        {"messages": [{**HELLO[0], "[key]": 1}]},
        "messages[0].'[key]': unknown field; leave it out.",
    ),
    "a strong bias": (chat(logit_bias={"5": 101}), "logit_bias.5: 101 is too large; the most is 100."),
    "a bias of true": (chat(logit_bias={"5": True}), "logit_bias.5 must be a number, not true."),
    "a list of biases": (chat(logit_bias=[1]), "logit_bias must be an object, not a list."),
    "a seed of 65 bits": (
        chat(seed=2**63),
        "seed: 9223372036854775808 is too large; the most is 9223372036854775807.",
    ),
    "a huge seed": (
        chat(seed=-(10**5000)),
        "seed: a number of some 5001 digits is too small; the least is -9223372036854775808.",
    ),
    "a number to stop at": (chat(stop=5), "stop must be a string or a list of strings, not 5."),
    "an empty stop": (chat(stop=""), "stop[0] must not be empty."),
    "a stop that is none": (chat(stop=["a", None]), "stop[1] must be a string, not null."),
    "a stop that is too long": (
        chat(stop=["a", "b", "c", "d" * 1025]), "stop[3] is longer than 1024 characters.",
    ),
    "seventeen stops": (chat(stop=["a"] * 17), "stop has 17 entries; at most 16 are taken."),
    "logprobs by number": (chat(logprobs=5), "logprobs must be true or false, not 5."),
    "many logprobs": (chat(logprobs=True, top_logprobs=21), "top_logprobs: 21 is too large; the most is 20."),
    "logprobs of nothing": (chat(top_logprobs=3), "top_logprobs needs logprobs: true."),
    "a format by name": (chat(response_format="json"), "response_format must be an object, not a string."),
    "an unknown format": (
        chat(response_format={"type": "xml"}),
        "response_format.type: 'xml' is not supported; use 'text', 'json_object' or 'json_schema'.",
    ),
    "a format without a type": (chat(response_format={}), "response_format.type is missing."),
    "a misspelt schema": (
        chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schem": {}}}),
        "response_format.json_schema.schem: unknown field; did you mean schema?",
    ),
    "a tool of another kind": (
        chat(tools=[LOOK, {"type": "code_interpreter"}]),
        "tools[1].type: 'code_interpreter' is not supported; use 'function'.",
    ),
    "a tool's bad name": (
        chat(tools=[{"type": "function", "function": {"name": "a b"}}]),
        "tools[0].function.name: 'a b' does not match ^[A-Za-z0-9_.-]{1,128}$.",
    ),
    "a choice of any": (
        chat(tools=[LOOK], tool_choice="any"),
        "tool_choice: 'any' is not supported; use 'none', 'auto' or 'required'.",
    ),
    "a choice by number": (
        chat(tool_choice=5),
        "tool_choice must be 'none', 'auto', 'required' or an object that names a function, not 5.",
    ),
    "a list of choices": (
        chat(tool_choice=[]),
        "tool_choice must be 'none', 'auto', 'required' or an object that names a function, not a list.",
    ),
    "a choice of nothing": (chat(tool_choice="required"), "tool_choice needs tools."),
    "a choice of another tool": (
        chat(tools=[WEATHER], tool_choice=LOOK),
        "tool_choice names a function that is not among the tools.",
    ),
    "a misspelt choice": (
        chat(tools=[LOOK], tool_choice={"type": "function", "function": {"name": "look", "nam": 1}}),
        "tool_choice.function.nam: unknown field; did you mean name?",
    ),
    "functions beside tools": (
        chat(functions=[LOOK["function"]], tools=[LOOK]),
        "functions is the older form of tools; send tools alone.",
    ),
    "a call of another function": (
        chat(functions=[WEATHER["function"]], function_call={"name": "look"}),
        "function_call names a function that is not among the functions.",
    ),
    "a choice in both forms": (
        chat(functions=[LOOK["function"]], function_call={"name": "look"}, tool_choice="auto"),
        "function_call is the older form of tool_choice; send tool_choice alone.",
    ),
    "a call that must be": (
        chat(functions=[LOOK["function"]], function_call="required"),
        "function_call: 'required' is not supported; use 'none' or 'auto'.",
    ),
    "a result without a name": (
        {"messages": [{"role": "function", "content": "x"}]},
        "messages[0].name is missing.",
    ),
    "an answer with annotations": (
        {"messages": [{"role": "assistant", "content": "x", "annotations": [{}]}]},
        "messages[0].annotations has 1 entries; at most 0 are taken.",
    ),
    "an unknown effort": (
        chat(reasoning_effort="hgih"),
        "reasoning_effort: 'hgih' is not supported; use 'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or 'max'.",
    ),
    "two efforts": (
        chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"}),
        "reasoning_effort and chat_template_kwargs.reasoning_effort differ; send one of them.",
    ),
    "an unknown tier": (
        chat(service_tier="gold"),
        "service_tier: 'gold' is not supported; use 'auto', 'default', 'flex', 'scale', 'priority' or 'fast'.",
    ),
    "speech": (chat(modalities=["text", "audio"]), "modalities[1]: 'audio' is not supported; use 'text'."),
    "speech alone": (chat(modalities=["audio"]), "modalities[0]: 'audio' is not supported; use 'text'."),
    "a voice": (chat(audio={"voice": "alloy", "format": "wav"}), "audio is not supported; leave it out."),
    "a search": (chat(web_search_options={}), "web_search_options is not supported; leave it out."),
    "a key without a name": (chat(prompt_cache_key=""), "prompt_cache_key must not be empty."),
    "the template's own": (
        chat(chat_template_kwargs={"enable_thinking": True, "tools": [], "return_dict": True}),
        "chat_template_kwargs cannot set return_dict, tools; the worker does.",
    ),
    "little to keep": (
        chat(specprefill_keep_pct=0.05),
        "specprefill_keep_pct: 0.05 is too small; the least is 0.1.",
    ),
    "a word about drafts": (
        chat(speculation="yes"),
        "speculation must be true, false or an object with max_tokens, not a string.",
    ),
    "drafts that are too long": (
        chat(speculation={"max_tokens": 8}),
        "speculation.max_tokens: 8 is too large; the most is 7.",
    ),
    "a prediction of an image": (
        chat(prediction={"type": "content", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
        "prediction.content[0].type: 'image_url' is not supported; use 'text'.",
    ),
    "an endless prediction": (
        chat(prediction={"type": "content", "content": "x" * 1_000_001}),
        "prediction holds more than 1,000,000 characters; send fewer.",
    ),
    "a deadline of now": (chat(deadline_s=0), "deadline_s: 0 is too small; it must be more than 0."),
    "a strange wish": (
        chat(on_disconnect="wait"),
        "on_disconnect: 'wait' is not supported; use 'continue' or 'cancel'.",
    ),
    "a tenant without a name": (chat(tenant=""), "tenant must not be empty."),
    "a tenant with a long name": (chat(tenant="a" * 129), "tenant is longer than 128 characters."),
    "a list of metadata": (chat(metadata=[]), "metadata must be an object, not a list."),
    "deep metadata": (
        chat(metadata=json.loads('{"a":' * 65 + "1" + "}" * 65)),
        "metadata is nested more than 64 levels deep.",
    ),
    "endless metadata": (
        chat(metadata={"a": [json.loads("1e999")]}),
        "metadata holds a number that is not finite; send a number or null.",
    ),
    "store by number": (chat(store=1), "store must be true or false, not 1."),
    "stream by name": (chat(stream="yes"), "stream must be true or false, not a string."),
    "a misspelt option": (
        chat(stream_options={"include_usag": True}),
        "stream_options.include_usag: unknown field; did you mean include_usage?",
    ),
    "two answers": (chat(n=2), "n: 2 is too large; the most is 1."),
    "true answers": (chat(n=True), "n must be a whole number, not true."),
    "four things": (
        {"max_tokens": 0, "top_k": "x", "n": 3},
        "messages is missing. max_tokens: 0 is too small; the least is 1. "
        "top_k must be a whole number, not a string. And 1 more.",
    ),
}  # fmt: skip
