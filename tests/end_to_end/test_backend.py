"""A backend has modules of its own, some with our names."""

import subprocess
import sys
from pathlib import Path

from tests.support.stack import ROOT, WorkerProcess

BACKEND = """
import asyncio
import sys

import schemas
import worker
from sluice import Client, Delta

async def main():
    async with Client(sys.argv[1]) as client:
        job = await client.submit([{"role": "user", "content": "Count to 5."}])
        async for event in client.stream(job.id):
            if isinstance(event, Delta):
                print(event.content or "", end="")

asyncio.run(main())
assert schemas.MINE and worker.MINE
heavy = {"mlx", "mlx_lm", "arq", "pydantic", "typer", "rich"} & set(sys.modules)
assert not heavy, heavy
"""


def test_a_backend_with_its_own_schemas_and_worker_uses_our_client(
    worker: WorkerProcess, redis_url: str, tmp_path: Path
) -> None:
    (tmp_path / "schemas.py").write_text("MINE = True")
    (tmp_path / "worker.py").write_text("MINE = True")
    (tmp_path / "main.py").write_text(BACKEND)
    # As installed in a backend's environment: our packages come after its own folder.
    code = f"import sys; sys.path.append({str(ROOT)!r})\n" + BACKEND
    (tmp_path / "main.py").write_text(code)
    ran = subprocess.run(
        [sys.executable, str(tmp_path / "main.py"), redis_url], cwd=tmp_path, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stdout) == (0, "1 2 3 4 5"), ran.stderr
