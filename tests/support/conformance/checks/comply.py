"""llm-comply: the suites of Open Responses, OpenAI's chat completions and Anthropic's messages."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.support.conformance.checks.checking import URL, write
from tests.support.conformance.programs.script import MODEL

_LETTERS = 500  # of a reason
_SUITES = {"open-responses": "responses", "openai-chat": "chat", "anthropic": "messages"}


def _results(suite: str) -> list[dict[str, Any]]:
    command = [str(Path(sys.executable).parent / "llm-comply"), "run", "--base-url", f"{URL}/v1", "--api-key", "none"]
    ran = subprocess.run([*command, "--model", MODEL, "--format", suite, "--json"], capture_output=True, text=True)
    try:
        found: list[dict[str, Any]] = json.loads(ran.stdout)["results"]
    except (ValueError, KeyError):
        return [{"name": "results", "status": "failed", "errors": [ran.stdout[-200:] + ran.stderr[-200:]]}]
    return found


def main() -> None:
    """Run the suites, and print a line for each test."""
    write("version", version("llm-comply"))
    for suite, interface in _SUITES.items():
        for result in _results(suite):
            name = f"{interface}: {result['name']}"
            if result["status"] == "passed":
                write("pass", name)
            elif result["status"] == "failed":
                write("fail", name, "; ".join(result.get("errors", ["no reason given"]))[:_LETTERS])


if __name__ == "__main__":
    main()
