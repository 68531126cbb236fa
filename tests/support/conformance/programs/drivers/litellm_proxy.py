"""One turn through LiteLLM's proxy, with the OpenAI client: litellm_proxy.py begin|"go on" IMAGE MESSAGE."""

import base64
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from openai import OpenAI

KEPT = Path("history.json")
SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a line of shell",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def proxy() -> tuple["subprocess.Popen[bytes]", str]:
    """Start the proxy with ~/litellm.yaml, and wait until it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).parent / "litellm"), "--config", str(Path.home() / "litellm.yaml")]
    env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"], stdout=sys.stderr, env=env
    )
    for _ in range(1200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process, f"http://127.0.0.1:{port}/v1"
        time.sleep(0.1)
    raise RuntimeError("the proxy did not start")


def call(arguments: str) -> str:
    """Return what the tool returns."""
    try:
        line = json.loads(arguments)["command"]
    except (ValueError, KeyError) as error:
        return f"error: {error!r}"
    return subprocess.run(line, shell=True, capture_output=True, text=True).stdout


def main(how: str, image: str, message: str) -> None:
    messages: list[Any] = json.loads(KEPT.read_text(encoding="utf-8")) if how == "go on" else []
    parts: list[Any] = [{"type": "text", "text": message}]
    if image:
        url = "data:image/png;base64," + base64.b64encode(Path(image).read_bytes()).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    messages.append({"role": "user", "content": parts})
    process, url = proxy()
    try:
        with OpenAI(base_url=url, api_key=os.environ["LITELLM_MASTER_KEY"], timeout=600) as client:
            for _ in range(8):
                with client.chat.completions.stream(model="my-model", messages=messages, tools=[SHELL]) as stream:  # type: ignore[list-item]
                    for event in stream:
                        if event.type == "content.delta":
                            print(event.delta, end="", flush=True)
                    said = stream.get_final_completion().choices[0].message
                messages.append(said.model_dump(exclude_none=True, exclude={"parsed"}))
                if not said.tool_calls:
                    break
                for made in said.tool_calls:
                    done = call(made.function.arguments) if made.function.name == "shell" else "error: no such tool"
                    messages.append({"role": "tool", "tool_call_id": made.id, "content": done})
        KEPT.write_text(json.dumps(messages), encoding="utf-8")
    finally:
        process.terminate()


if __name__ == "__main__":
    main(*sys.argv[1:])
