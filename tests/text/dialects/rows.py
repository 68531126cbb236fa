"""What models write in each dialect: a row of data for each, in the form that public suites and templates show."""

OSLO = ("weather", {"city": "Oslo", "days": 2})
NOW = ("now", {})

_CODER = "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>"
_NOW = "<function=now>\n</function>"
_SEED = "<function=weather>\n<parameter=city>Oslo</parameter>\n<parameter=days>2</parameter>\n</function>"
_KEYS = "{0}city{1}{2}Oslo{3}{0}days{1}{2}2{3}"
_INVOKED = (
    '<{0}invoke name="weather">\n<{0}parameter name="city">Oslo</{0}parameter>\n'
    '<{0}parameter name="days">2</{0}parameter>\n</{0}invoke>'
)
_DSML = (
    '<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>'
)
_OBJECTS = '[{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}, {"name": "now", "arguments": {}}]'
_TOOLS = (
    '[{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Oslo", "days": 2}}, '
    '{"tool_call_id": "1", "tool_name": "now", "parameters": {}}]'
)
_NS = "]<]minimax[>["
_LINES = '{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n{"name": "now", "arguments": {}}'

# What a model writes for the calls `OSLO` and `NOW`.
WRITTEN = {
    "llama4": '[weather(city="Oslo", days=2), now()]',
    "llama3": '{"name": "weather", "parameters": {"city": "Oslo", "days": 2}}; {"name": "now", "parameters": {}}',
    "seed": f"<seed:tool_call>\n{_SEED}\n</seed:tool_call>\n<seed:tool_call>\n{_NOW}\n</seed:tool_call>",
    "qwen3_coder": f"<tool_call>\n{_CODER}\n</tool_call>\n<tool_call>\n{_NOW}\n</tool_call>",
    "glm": "<tool_call>weather\n"
    + _KEYS.format("<arg_key>", "</arg_key>\n", "<arg_value>", "</arg_value>\n")
    + "</tool_call>\n<tool_call>now\n</tool_call>",
    "longcat": "<longcat_tool_call>weather\n"
    + _KEYS.format("<longcat_arg_key>", "</longcat_arg_key>\n", "<longcat_arg_value>", "</longcat_arg_value>\n")
    + '</longcat_tool_call>\n<longcat_tool_call>{"name": "now", "arguments": {}}</longcat_tool_call>',
    "hunyuan": "<tool_calls:opensource>\n<tool_call:opensource>weather<tool_sep:opensource>\n"
    + _KEYS.format(
        "<arg_key:opensource>", "</arg_key:opensource>\n", "<arg_value:opensource>", "</arg_value:opensource>\n"
    )
    + "</tool_call:opensource>\n<tool_call:opensource>now<tool_sep:opensource>\n</tool_call:opensource>\n"
    "</tool_calls:opensource>",
    "hunyuan_plain": "<tool_calls><tool_call>weather<tool_sep><arg_key>city</arg_key><arg_value>Oslo</arg_value>"
    "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call><tool_call>now<tool_sep></tool_call></tool_calls>",
    "minimax_m2": f'<minimax:tool_call>\n{_INVOKED.format("")}\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "minimax_m3": f'{_NS}<tool_call>\n{_NS}<invoke name="weather">{_NS}<city>Oslo{_NS}</city>{_NS}<days>2{_NS}</days>'
    f'{_NS}</invoke>\n{_NS}<invoke name="now">{_NS}</invoke>\n{_NS}</tool_call>',
    "deepseek_v3.2": f"<｜DSML｜function_calls>\n{_DSML}\n</｜DSML｜function_calls>",
    "deepseek_v4": f"<｜DSML｜tool_calls>\n{_DSML}\n</｜DSML｜tool_calls>",
    "muse_spark": f"<atem:function_calls>\n{_INVOKED.format('atem:')}\n"
    '<atem:invoke name="now">\n</atem:invoke>\n</atem:function_calls>',
    "minicpm5": '<function name="weather"><param name="city"><![CDATA[Oslo]]></param><param name="days">2</param>'
    '</function><function name="now"></function>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" '
    'type="string"<|sep|>Oslo<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>2<|close|>'
    'argument<|sep|><|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools'
    "<|sep|>",
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "Oslo", "days": 2}[TOOL_CALLS]now[ARGS]{}',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Oslo", "days": 2}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Oslo", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n'
    "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Oslo", "days": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "solar": "<|tool_calls|><|tool_call:begin|>a1b2<|tool_call:name|>weather<|tool_call:args|>"
    '{"city": "Oslo", "days": 2}<|tool_call:end|><|tool_call:begin|>c3d4<|tool_call:name|>now<|tool_call:args|>{}'
    "<|tool_call:end|>",
    "functionary_v3.1": '<function=weather>{"city": "Oslo", "days": 2}</function>\n<function=now>{}</function>',
    "functionary_v3.2": '>>>weather\n{"city": "Oslo", "days": 2}>>>now\n{}',
    "firefunction": f" functools{_OBJECTS}",
    "gemma4": '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|><|tool_call>call:now{}<tool_call|>',
    "function_gemma": "<start_function_call>call:weather{city:<escape>Oslo<escape>,days:2}<end_function_call>"
    "<start_function_call>call:now{}<end_function_call>",
    "lfm2": "<|tool_call_start|>[weather(city='Oslo', days=2), now()]<|tool_call_end|>",
    "olmo3": '<function_calls>\nweather(city="Oslo", days=2)\nnow()\n</function_calls>',
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "apertus": '<|tools_prefix|>[{"weather": {"city": "Oslo", "days": 2}}, {"now": {}}]<|tools_suffix|>',
    "command": f"<|START_ACTION|>{_TOOLS}<|END_ACTION|>",
    "command_r": f"Action:\n```json\n{_TOOLS}\n```",
    "phi4": f"<|tool_call|>{_OBJECTS}<|/tool_call|>",
    "granite3": f"<|tool_call|>{_OBJECTS}",
    "nemotron_v2": f"<TOOLCALL>{_OBJECTS}</TOOLCALL>",
    "tool_calls": f"<tool_calls>\n{_LINES}\n</tool_calls>",
    "gigachat3.1": "<|function_call|>" + _LINES.replace("\n", "<|function_call|>"),
    "gigachat3": "function call<|role_sep|>\n" + _LINES.replace("\n", "function call<|role_sep|>\n"),
    "internlm": "<|action_start|><|plugin|>\n"
    + _LINES.replace("\n", "<|action_end|>\n<|action_start|><|plugin|>\n")
    + "<|action_end|>",
}

# What models write instead, as the public suites of vLLM, SGLang and llama.cpp have it, for the same two calls.
DEVIATIONS = {
    "no opening marker": ("qwen3_coder", f"{_CODER}\n</tool_call>\n{_NOW}\n</tool_call>"),
    "no marker at all": ("qwen3_coder", f"{_CODER}\n<function=now>\n</function>"),
    "no last closing marker": ("qwen3_coder", f"<tool_call>\n{_CODER}\n</tool_call>\n<tool_call>\n{_NOW}"),
    "two functions between two markers": ("qwen3_coder", f"<tool_call>\n{_CODER}\n{_NOW}\n</tool_call>"),
    "no end of a parameter": (
        "qwen3_coder",
        f"<tool_call>\n{_CODER.replace('</parameter>', '', 1)}\n</tool_call>\n<tool_call>\n{_NOW}\n</tool_call>",
    ),
    "no end of the last parameter": (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n</function>\n"
        f"</tool_call>\n<tool_call>\n{_NOW}\n</tool_call>",
    ),
    "JSON instead of tags": ("qwen3_coder", f"<tool_call>\n{_LINES}\n</tool_call>"),
    "no line ends": ("glm", WRITTEN["glm"].replace("\n", "")),
    "JSON in the marker of keys": ("glm", f"<tool_call>{_LINES}</tool_call>"),
    "two calls in one marker": ("hermes", f"<tool_call>\n{_LINES}\n</tool_call>"),
    "a list in one marker": ("hermes", f"<tool_call>{_OBJECTS}</tool_call>"),
    "no closing marker": ("hermes", "<tool_call>\n" + _LINES.replace("\n", "\n<tool_call>\n")),
    "no opening marker of JSON": ("hermes", f"{_LINES}\n</tool_call>"),
    "parameters instead of arguments": ("hermes", WRITTEN["hermes"].replace("arguments", "parameters")),
    "arguments before the name": (
        "hermes",
        '<tool_call>{"arguments": {"city": "Oslo", "days": 2}, "name": "weather"}</tool_call>'
        '<tool_call>{"arguments": {}, "name": "now"}</tool_call>',
    ),
    "arguments as a string": (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\", \\"days\\": 2}"}</tool_call>'
        '<tool_call>{"name": "now", "arguments": null}</tool_call>',
    ),
    "OpenAI's form": (
        "hermes",
        '<tool_call>{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}}'
        '</tool_call><tool_call>{"type": "function", "function": {"name": "now"}}</tool_call>',
    ),
    "Python's form of JSON": (
        "hermes", "<tool_call>{'name': 'weather', 'arguments': {'city': 'Oslo', 'days': 2,}}</tool_call>"
        "<tool_call>{'name': 'now', 'arguments': {}}</tool_call>",
    ),
    "a missing bracket": (
        "hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "days": 2}\n</tool_call>'
        '<tool_call>{"name": "now", "arguments": {}\n</tool_call>',
    ),
    "with a marker": ("llama3", '<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo", "days": 2}}'
                      '<|python_tag|>{"name": "now", "parameters": {}}'),
    "arguments instead of parameters": ("llama3", _LINES.replace("\n", "; ")),
    "a list of objects": ("llama3", _OBJECTS),
    "arguments without names": ("llama4", '[weather("Oslo", 2), now()]'),
    "between markers": ("llama4", '<|python_start|>[weather(city="Oslo", days=2), now()]<|python_end|>'),
    "JSON in the marker of Python": ("lfm2", f"<|tool_call_start|>{_OBJECTS}<|tool_call_end|>"),
    "a list": ("mistral", f"[TOOL_CALLS]{_OBJECTS}"),
    "ids of calls": (
        "mistral", '[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Oslo", "days": 2}'
        "[TOOL_CALLS]now[CALL_ID]b1b2c3d4e[ARGS]{}",
    ),
    "no section": (
        "kimi_k2", '<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Oslo", "days": 2}'
        "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>",
    ),
    "no end of the section": ("kimi_k2", WRITTEN["kimi_k2"].removesuffix("<|tool_calls_section_end|>")),
    "names alone": ("kimi_k2", WRITTEN["kimi_k2"].replace("functions.", "").replace(":0<", "<").replace(":1<", "<")),
    "no end of the calls": ("deepseek_v3.1", WRITTEN["deepseek_v3.1"].removesuffix("<｜tool▁calls▁end｜>")),
    "no space before the marker": ("firefunction", f"functools{_OBJECTS}"),
    "FireFunction's marker": ("phi4", f"functools{_OBJECTS}"),
    "no end of an element": ("minimax_m3", WRITTEN["minimax_m3"].replace(f"{_NS}</days>", "")),
    "elements on lines of their own": ("minimax_m3", WRITTEN["minimax_m3"].replace(f"</city>{_NS}", f"</city>\n{_NS}")),
    "an object in place of parameters": (
        "deepseek_v3.2", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n{"city": "Oslo", "days": 2}\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n{}\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    ),
    "a tag instead of the token": ("granite3", f"<tool_call>{_OBJECTS}"),
    "no name before the colon": ("gemma4", WRITTEN["gemma4"].replace("call:", ":")),
    "no list": ("granite3", '<|tool_call|>{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}'
                '<|tool_call|>{"name": "now", "arguments": {}}'),
    "no end marker": ("phi4", f"<|tool_call|>{_OBJECTS}"),
    "no end of the action": ("command", f"<|START_ACTION|>{_TOOLS}"),
}  # fmt: skip
