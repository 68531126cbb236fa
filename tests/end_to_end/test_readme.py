"""What the README shows works as it stands."""

import re
import subprocess
import sys

import pytest

from scripts.stack import ROOT, WorkerProcess
from worker.settings import Settings, variable

README = (ROOT / "README.md").read_text()
PLAIN_ARQ, OUR_CLIENT, OPENAI_BACKEND, BATCH = re.findall(
    r"```python\n(.*?)```", README, re.DOTALL
)  # test_openai serves it


@pytest.mark.parametrize("code", [PLAIN_ARQ, OUR_CLIENT], ids=["plain arq", "our client"])
def test_an_example_prints_the_answer(worker: WorkerProcess, redis_url: str, code: str) -> None:
    code = code.replace("redis://localhost:6379", redis_url.removesuffix("/0"))
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (ran.returncode, ran.stdout) == (0, "1 2 3 4 5 6 7 8 9 10 11 12"), ran.stderr


def test_the_table_lists_every_setting_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(SLUICE_\w+)` \| (.*?) \|", README, re.MULTILINE))
    assert list(rows) == [variable(name) for name in Settings.model_fields]
    for name, field in Settings.model_fields.items():
        if field.default is not None and field.default_factory is None and not field.is_required():
            default = f"{field.default:g}" if isinstance(field.default, float) else str(field.default).lower()
            assert rows[variable(name)].strip("`").lower() == default.lower()


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
