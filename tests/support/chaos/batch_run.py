"""`sluice batch run` as a child process, for the scenarios and the benchmarks."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from sluice.contract.batch import Batch
from tests.support.stack import ROOT

_RUN_S = 1800.0  # longer than any run of the scripts


class BatchRun:
    """One run that can be killed and started again. All its files are in `folder`: input, output, report and stderr."""

    def __init__(
        self, url: str, folder: Path, bodies: Sequence[Mapping[str, object]], *, option: str = "--redis-url"
    ) -> None:
        """`option`: that of the command that `url` is for."""
        folder.mkdir(exist_ok=True)
        self.output, self._report, self._notes = (folder / name for name in ("out.jsonl", "report.json", "notes.txt"))
        input = folder / "in.jsonl"
        input.write_text("".join(f"{json.dumps(_line(number, body))}\n" for number, body in enumerate(bodies)), "utf-8")
        files = str(input), "-o", str(self.output)
        self._command = [sys.executable, "-m", "sluice.cli", "batch", "run", *files, option, url, "--json"]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start the command, or resume the run after `kill`."""
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        with self._report.open("wb") as report, self._notes.open("ab") as notes:
            self.process = subprocess.Popen(self._command, stdout=report, stderr=notes, env=env, start_new_session=True)
        return self

    def kill(self) -> None:
        """Kill the process; no effect if it has ended."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @property
    def running(self) -> bool:
        """True until the process has ended."""
        return self.process is not None and self.process.poll() is None

    def wait(self) -> int:
        """Wait for the end of the process, and return its exit code."""
        assert self.process is not None
        return self.process.wait(_RUN_S)

    def report(self) -> Batch:
        """Return the final status that the command printed."""
        return Batch.from_json(self._report.read_text("utf-8"))

    def answered(self) -> int:
        """Return the number of lines answered so far."""
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0

    def wait_for(self, lines: int) -> None:
        """Block until `lines` lines are answered, or the process has ended."""
        while self.running and self.answered() < lines:
            time.sleep(0.05)

    def answers(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of the output file."""
        with self.output.open("rb") as file:
            yield from map(json.loads, file)


def _line(number: int, body: Mapping[str, object]) -> dict[str, object]:
    return {"custom_id": custom_id(number), "method": "POST", "url": "/v1/chat/completions", "body": body}


def custom_id(number: int) -> str:
    """Return the custom_id of a line, counted from 0."""
    return f"line-{number:05}"


def number_of(answer: Mapping[str, str]) -> int:
    """Return the number of the line that an answer belongs to."""
    return int(answer["custom_id"].removeprefix("line-"))
