"""llm-comply: the suites of Open Responses, OpenAI's chat completions and Anthropic's messages."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scripts.clients.checks.checking import MODEL, SEEING, URL, write

_SUITES = {"open-responses": "responses", "openai-chat": "chat", "anthropic": "messages"}
_PICTURES = "image"  # in the name of a test that needs a model that takes images


def _results(suite: str, model: str) -> list[dict[str, Any]]:
    command = [str(Path(sys.executable).parent / "llm-comply"), "run", "--base-url", f"{URL}/v1", "--api-key", "none"]
    ran = subprocess.run([*command, "--model", model, "--format", suite, "--json"], capture_output=True, text=True)
    try:
        found: list[dict[str, Any]] = json.loads(ran.stdout)["results"]
    except (ValueError, KeyError):
        return [{"name": "results", "status": "failed", "errors": [ran.stdout[-200:] + ran.stderr[-200:]]}]
    return found


def main() -> None:
    """Run the suites, and print a line for each test."""
    write("version", version("llm-comply"))
    for suite, interface in _SUITES.items():
        seen = {result["name"]: result for result in _results(suite, SEEING)}
        for result in _results(suite, MODEL):
            name = f"{interface}: {result['name']}"
            taken = seen[result["name"]] if _PICTURES in result["name"].lower() else result
            if taken["status"] == "passed":
                write("pass", name)
            elif taken["status"] == "failed":
                write("fail", name, "; ".join(taken.get("errors", ["no reason given"])))


if __name__ == "__main__":
    main()
