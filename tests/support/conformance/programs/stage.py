"""A server, a worker that plays scripts, a gateway, and the recorder before it, for as long as a block lasts."""

import json
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.support.conformance.programs.record import Recorder
from tests.support.conformance.programs.script import MODEL
from tests.support.stack import TINY_CHAT, GatewayProcess, Server, WorkerProcess, embedded_binary

CONTEXT_TOKENS = 131_072  # of the model, on these pages too
_VOCAB = 1024  # of models/tiny-chat, whose tokenizer has the tokens of images
# As models/tiny-chat's, with images and with thoughts of earlier answers left out, as templates of Qwen's do.
_TEMPLATE = """\
{%- macro text(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content or [] %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}{% endmacro %}
{%- for m in messages %}
{%- if m.role == 'system' %}
{%- if not loop.first %}{{- raise_exception('System message must be at the beginning.') }}{%- endif %}
{{- '<|im_start|>system\\n' }}{% if tools %}{{- 'Tools: ' + (tools | tojson) + '\\n' }}{% endif %}
{{- text(m.content) + '<|im_end|>\\n' }}
{%- elif m.role == 'user' %}{{- '<|im_start|>user\\n' + text(m.content) + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant\\n' + text(m.content) }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + text(m.content) + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{- raise_exception('Unexpected role: ' + m.role) }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@dataclass(frozen=True, slots=True)
class Played:
    """A line of the player's log: a prompt, and the tokens of it that an earlier one had."""

    job: str
    turn: int
    step: int | None
    prompt_tokens: int
    found_tokens: int
    images: int
    max_tokens: int


class Stage:
    """The processes. `worker` and `gateway` may be killed and started again."""

    def __init__(self, **settings: object) -> None:
        """`settings`: of the worker, as `context_tokens=8000`."""
        self._settings: dict[str, Any] = {"model_name": MODEL, "context_tokens": CONTEXT_TOKENS, **settings}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with self._stack as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-played-")))
            self._log = folder / "played.jsonl"
            self._server = stack.enter_context(Server(embedded_binary(), args=("--appendonly", "yes")))
            self._model = write_model(folder / "model")
            self.worker = stack.enter_context(self._player())
            self.gateway = stack.enter_context(GatewayProcess(self._server.url))
            self._recorder = stack.enter_context(Recorder(lambda: self.gateway.port))
            self.url = self._recorder.url
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _player(self) -> WorkerProcess:
        return WorkerProcess(
            self._server.url,
            model=self._model,
            module="tests.support.conformance.programs.player",
            more_env={"PLAYER_LOG": str(self._log)},
            **self._settings,
        )

    def kill_worker(self) -> None:
        """End the worker as `kill -9` does, and start another one."""
        self.worker.kill()
        self.worker = self._stack.enter_context(self._player())

    def kill_gateway(self) -> None:
        """End the gateway as `kill -9` does, and start it again on its port."""
        self.gateway.kill()
        self.gateway.start()

    def played(self) -> list[Played]:
        """Return the prompts so far."""
        return [Played(**line) for line in self._lines() if "turn" in line]

    def stopped(self) -> list[str]:
        """Return the jobs that were stopped before their end."""
        return [line["stopped"] for line in self._lines() if "stopped" in line]

    def _lines(self) -> list[dict[str, Any]]:
        return (
            [json.loads(line) for line in self._log.read_text(encoding="utf-8").splitlines()]
            if self._log.exists()
            else []
        )

    @property
    def recorder(self) -> Recorder:
        """What the programs have sent and received."""
        return self._recorder


def write_model(folder: Path) -> Path:
    """Write a tiny random model that takes images, with the tokenizer of models/tiny-chat. Returns `folder`."""
    from models.tiny_vision import write_checkpoint  # loads mlx-vlm, which --help does not need

    sizes = {"vocab_size": _VOCAB, "max_position_embeddings": 2 * CONTEXT_TOKENS, "num_hidden_layers": 2}
    write_checkpoint("qwen3_vl", folder, text=sizes)
    tokens = {found["content"]: found["id"] for found in _read(TINY_CHAT / "tokenizer.json")["added_tokens"]}
    ids = {
        "image_token_id": tokens["<|image_pad|>"],
        "video_token_id": _VOCAB - 1,
        "vision_start_token_id": tokens["<|vision_start|>"],
        "vision_end_token_id": tokens["<|vision_end|>"],
        "eos_token_id": tokens["<|im_end|>"],
        "vocab_size": _VOCAB,
    }
    config = _read(folder / "config.json")
    _write(
        folder / "config.json",
        {**config, **ids, "text_config": {**config["text_config"], "eos_token_id": ids["eos_token_id"]}},
    )
    _write(folder / "generation_config.json", {"eos_token_id": [tokens["<|im_end|>"]]})
    shutil.copy(TINY_CHAT / "tokenizer.json", folder)
    named = {**_read(TINY_CHAT / "tokenizer_config.json"), "chat_template": _TEMPLATE}
    _write(folder / "tokenizer_config.json", {**named, "model_max_length": 2 * CONTEXT_TOKENS})
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    return folder


def _read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return content


def _write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")
