"""What the README shows works as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.end_to_end.test_cli import run_here
from tests.support.stack import ROOT, WorkerProcess

README = (ROOT / "README.md").read_text()


def test_the_example_in_python_prints_the_answer(worker: WorkerProcess, redis_url: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    code = code.replace("redis://localhost:6379", redis_url.removesuffix("/0"))
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (ran.returncode, ran.stdout) == (0, "1 2 3 4 5 6 7 8 9 10 11 12"), ran.stderr


def test_every_command_exists(tmp_path: Path) -> None:
    """`sluice check` would fetch a model: its `--help` has to do."""
    verbs = set(re.findall(r"^\$ (?:\S*/)?sluice (\w+)", README, re.MULTILINE))
    assert {"up", "chat", "check"} <= verbs
    assert [verb for verb in verbs if run_here(verb, "--help", env=os.environ, folder=tmp_path)[0] != 0] == []


def test_every_script_exists() -> None:
    scripts = set(re.findall(r"^\$ \./(\S+)", README, re.MULTILINE))
    assert scripts
    assert [script for script in scripts if not (ROOT / script).is_file()] == []
