"""What the README shows works as it stands."""

import re
import subprocess
import sys

import pytest

from scripts.stack import ROOT, WorkerProcess

README = (ROOT / "README.md").read_text()
CHATS = [code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if '"Count to 12."' in code]


@pytest.mark.parametrize("code", CHATS)
def test_an_example_of_a_chat_prints_the_answer(worker: WorkerProcess, redis_url: str, code: str) -> None:
    code = code.replace("redis://localhost:6379", redis_url.removesuffix("/0"))
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (ran.returncode, ran.stdout) == (0, "1 2 3 4 5 6 7 8 9 10 11 12"), ran.stderr
