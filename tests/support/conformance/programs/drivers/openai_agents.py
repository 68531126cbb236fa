"""One turn of an agent made with openai-agents: openai_agents.py chat|responses begin|"go on" IMAGE MESSAGE."""

import asyncio
import base64
import json
import subprocess
import sys
from pathlib import Path

from agents import Agent, Runner, function_tool, set_default_openai_api

KEPT = Path("history.json")


def shell(command: str) -> str:
    """Run a line of shell."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


async def main(api: str, how: str, image: str, message: str) -> None:
    set_default_openai_api("chat_completions" if api == "chat" else "responses")
    history = json.loads(KEPT.read_text(encoding="utf-8")) if how == "go on" else []
    parts = [{"type": "input_text", "text": message}]
    if image:
        url = "data:image/png;base64," + base64.b64encode(Path(image).read_bytes()).decode()
        parts.append({"type": "input_image", "image_url": url, "detail": "auto"})
    agent = Agent(name="Shell", instructions="You run shell commands.", tools=[function_tool(shell)])
    running = Runner.run_streamed(agent, [*history, {"role": "user", "content": parts}])
    async for event in running.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            print(event.data.delta, end="", flush=True)
    KEPT.write_text(json.dumps(running.to_input_list()), encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
