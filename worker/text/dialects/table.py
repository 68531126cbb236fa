"""The table of dialects. CONTRIBUTING.md says what else a new one needs."""

from dataclasses import dataclass

from worker.text.dialects.dialect import Dialect
from worker.text.dialects.json_calls import HeaderCalls, JsonCalls
from worker.text.dialects.pythonic import GemmaCalls, PythonicCalls
from worker.text.dialects.tag_calls import TagCalls

_MINIMAX = "]<]minimax[>["  # the token before each tag
_STRING_OR_NOT = ('string="true"', 'string="false"')


def _by_keys(name: str, prefix: str) -> TagCalls:
    """Return the dialect of GLM, whose tags may have a prefix."""
    return TagCalls(
        name,
        (f"<{prefix}tool_call>",),
        function=("", ""),
        parameter=(f"<{prefix}arg_key>", f"</{prefix}arg_key>"),
        value=(f"<{prefix}arg_value>", f"</{prefix}arg_value>"),
        closing=f"</{prefix}tool_call>",
    )


def _separated(name: str, suffix: str) -> TagCalls:
    """Return the dialect of Hunyuan 3, whose tags may have a suffix."""
    return TagCalls(
        name,
        (f"<tool_calls{suffix}>", f"<tool_call{suffix}>"),
        function=(f"<tool_call{suffix}>", f"<tool_sep{suffix}>"),
        parameter=(f"<arg_key{suffix}>", f"</arg_key{suffix}>"),
        value=(f"<arg_value{suffix}>", f"</arg_value{suffix}>"),
        end=f"</tool_call{suffix}>",
        closing=f"</tool_calls{suffix}>",
    )


def _invoked(name: str, prefix: str, section: str, typed: tuple[str, str] | tuple[()] = ()) -> TagCalls:
    """Return the dialect of Anthropic's older models, whose tags may have a prefix."""
    return TagCalls(
        name,
        (f"<{prefix}{section}>",),
        function=(f'<{prefix}invoke name="', ">"),
        parameter=(f'<{prefix}parameter name="', ">"),
        value=("", f"</{prefix}parameter>"),
        end=f"</{prefix}invoke>",
        closing=f"</{prefix}{section}>",
        typed=typed,
    )


# Of two dialects that read what a template writes, the first is the model's.
DIALECTS: tuple[Dialect, ...] = (
    JsonCalls("llama3", ("<|python_tag|>",), bare="{[", keys=("name", "parameters")),
    PythonicCalls(
        "llama4",
        ("<|python_end|>", "<|python_start|>"),  # models write the first one before calls, too
        "<|python_end|>",
        bare="[{",
        as_json=JsonCalls("", (), keys=("name", "parameters")),
    ),
    JsonCalls("hermes", ("<tool_call>",), "</tool_call>", bare="{", line="\n"),
    TagCalls(
        "seed",
        ("<seed:tool_call>",),
        function=("<function=", ">"),
        parameter=("<parameter=", ">"),
        value=("", "</parameter>"),
        end="</function>",
        closing="</seed:tool_call>",
        python=True,
    ),
    TagCalls(
        "qwen3_coder",
        ("<tool_call>", "<function="),
        function=("<function=", ">"),
        parameter=("<parameter=", ">"),
        value=("", "</parameter>"),
        end="</function>",
        closing="</tool_call>",
        line="\n",
    ),
    _by_keys("glm", ""),
    _by_keys("longcat", "longcat_"),
    _separated("hunyuan", ":opensource"),
    _invoked("minimax_m2", "", "minimax:tool_call"),
    TagCalls(
        "minimax_m3",
        (f"{_MINIMAX}<tool_call>",),
        function=(f'{_MINIMAX}<invoke name="', ">"),
        parameter=(f"{_MINIMAX}<", ">"),
        value=("", f"{_MINIMAX}</{{name}}>"),
        end=f"{_MINIMAX}</invoke>",
        closing=f"{_MINIMAX}</tool_call>",
        item="item",
    ),
    _invoked("deepseek_v3.2", "｜DSML｜", "function_calls", _STRING_OR_NOT),
    _invoked("deepseek_v4", "｜DSML｜", "tool_calls", _STRING_OR_NOT),
    _invoked("muse_spark", "atem:", "function_calls"),
    TagCalls(
        "minicpm5",
        ('<function name="',),
        function=('<function name="', ">"),
        parameter=('<param name="', ">"),
        value=("", "</param>"),
        end="</function>",
        cdata=True,
        python=True,
    ),
    TagCalls(
        "kimi_k3",
        ("<|open|>tools<|sep|>",),
        function=('<|open|>call tool="', "<|sep|>"),
        index='index="{index}"',
        parameter=('<|open|>argument key="', "<|sep|>"),
        value=("", "<|close|>argument<|sep|>"),
        end="<|close|>call<|sep|>",
        closing="<|close|>tools<|sep|>",
        typed=('type="string"', 'type="{type}"'),
        gap="",
    ),
    HeaderCalls(
        "mistral",
        ("[TOOL_CALLS]",),
        header=r"(?P<name>[^\[\]]+?)(?:\[CALL_ID\](?P<id>[^\[\]]*))?",
        separator="[ARGS]",
        form="[TOOL_CALLS]{name}[ARGS]{arguments}",
        more_forms=("[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]{arguments}",),
        as_list=JsonCalls("mistral_list", ("[TOOL_CALLS]",), ids=("", "id"), is_list=True),
        unmarked=True,
    ),
    HeaderCalls(
        "kimi_k2",
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        header=r"(?P<id>(?:functions\.)?(?P<name>.+?)(?::[0-9]+)?)",
        separator="<|tool_call_argument_begin|>",
        form="<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
        each="<|tool_call_begin|>",
        end="<|tool_call_end|>",
        closing="<|tool_calls_section_end|>",
    ),
    HeaderCalls(
        "deepseek_v3",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        header=r"function<｜tool▁sep｜>(?P<name>.+)",
        separator="```json",
        form="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
        each="<｜tool▁call▁begin｜>",
        end="```<｜tool▁call▁end｜>",
        short_end="<｜tool▁call▁end｜>",
        closing="<｜tool▁calls▁end｜>",
    ),
    HeaderCalls(
        "deepseek_v3.1",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        header=r"(?P<name>.+)",
        separator="<｜tool▁sep｜>",
        form="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        each="<｜tool▁call▁begin｜>",
        end="<｜tool▁call▁end｜>",
        closing="<｜tool▁calls▁end｜>",
    ),
    HeaderCalls(
        "solar",
        ("<|tool_calls|>", "<|tool_call:begin|>"),
        header=r"(?P<id>.*?)<\|tool_call:name\|>(?P<name>.+)",
        separator="<|tool_call:args|>",
        form="<|tool_call:begin|>{index}<|tool_call:name|>{name}<|tool_call:args|>{arguments}<|tool_call:end|>",
        more_forms=("<|tool_call:begin|>{id}<|tool_call:name|>{name}<|tool_call:args|>{arguments}<|tool_call:end|>",),
        each="<|tool_call:begin|>",
        end="<|tool_call:end|>",
    ),
    HeaderCalls(
        "functionary_v3.1",
        ("<function=",),
        header=r"(?P<name>.+)",
        separator=">",
        form="<function={name}>{arguments}</function>",
        end="</function>",
    ),
    HeaderCalls(
        "functionary_v3.2",
        (">>>",),
        header=r"(?P<name>[\w.-]+)",
        separator="\n",
        form=">>>{name}\n{arguments}",
        only_objects=True,
    ),
    GemmaCalls("gemma4", ("<|tool_call>",), "<tool_call|>", '<|"|>'),
    GemmaCalls("function_gemma", ("<start_function_call>",), "<end_function_call>", "<escape>"),
    PythonicCalls("lfm2", ("<|tool_call_start|>",), "<|tool_call_end|>"),
    PythonicCalls("olmo3", ("<function_calls>",), "</function_calls>"),
    JsonCalls("apertus", ("<|tools_prefix|>",), "<|tools_suffix|>", named_by_key=True, is_list=True),
    JsonCalls(
        "command",
        ("<|START_ACTION|>",),
        "<|END_ACTION|>",
        keys=("tool_name", "parameters"),
        ids=("tool_call_id", ""),
        is_list=True,
    ),
    JsonCalls(
        "command_r",
        ("Action:\n```json", "Action: ```json"),
        "```",
        keys=("tool_name", "parameters"),
        ids=("tool_call_id", ""),
        is_list=True,
        line="\n",
    ),
    JsonCalls("phi4", ("<|tool_call|>", "functools"), "<|/tool_call|>", is_list=True),
    JsonCalls("granite3", ("<|tool_call|>", "<tool_call>"), is_list=True),
    JsonCalls("nemotron_v2", ("<TOOLCALL>",), "</TOOLCALL>", is_list=True),
    JsonCalls("tool_calls", ("<tool_calls>",), "</tool_calls>", ids=("", "id"), is_list=True),
    JsonCalls("gigachat3.1", ("<|function_call|>",)),
    JsonCalls("gigachat3", ("function call<|role_sep|>", "<|message_sep|>\n\nfunction call<|role_sep|>")),
    JsonCalls("firefunction", (" functools", "functools"), is_list=True),
    JsonCalls("internlm", ("<|action_start|><|plugin|>",), "<|action_end|>"),
    _separated("hunyuan_plain", ""),
)


def by_name(name: str | None) -> Dialect | None:
    """Return the dialect of this name."""
    return next((dialect for dialect in DIALECTS if dialect.name == name), None)


@dataclass(frozen=True)
class Thoughts:
    """Markers around a model's reasoning, and around its answer if the answer has some."""

    begin: str  # empty, and so is `end`, for a model that marks its answer alone
    end: str
    answer: tuple[str, ...] = ()
    header: tuple[str, str] | tuple[()] = ()  # around the recipient of a message, at its beginning
    closing: tuple[str, str] = ("", "")  # white space that the model writes before and after the end


THOUGHTS = (
    Thoughts("<think>", "</think>", ("<response>", "</response>")),
    Thoughts("[THINK]", "[/THINK]"),
    Thoughts("<seed:think>", "</seed:think>"),
    Thoughts("<|START_THINKING|>", "<|END_THINKING|>", (
        "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>",
    )),
    Thoughts("<mm:think>", "</mm:think>"),
    Thoughts("<think:opensource>", "</think:opensource>"),
    Thoughts("<|channel>thought", "<channel|>"),
    Thoughts("<|open|>think<|sep|>", "<|close|>think<|sep|>", (
        "<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>",
    )),
    Thoughts("<|think|>", "<|end|><|begin|>assistant<|content|>"),
    Thoughts("to=self<|message|>", "<|eom|>", ("<|start|>assistant",), ("to=", "<|message|>")),
    Thoughts("", "", (">>>all\n",)),
    Thoughts("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", ("[END FINAL RESPONSE]",)),
)  # fmt: skip
