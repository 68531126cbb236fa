import os
import subprocess
import sys
from pathlib import Path

from tests.waiting import until
from worker.supervisor.locks import WorkerLocks

# A supervisor with a worker, whose process id it prints. The worker ends when its stdin closes.
KILLED = """
import os, subprocess, sys, pathlib
from worker.supervisor.locks import WorkerLocks
locks = WorkerLocks(pathlib.Path(sys.argv[1]))
lock = locks.lock_worker(70)
worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=sys.stdin, pass_fds=[lock])
os.close(lock)
print(worker.pid, flush=True)
worker.wait()
"""


def left(locks: WorkerLocks) -> list[tuple[int, bool, bool]]:
    return [(each.nbytes, each.in_memory, each.leaving) for each in locks.left()]


async def test_the_workers_of_a_killed_supervisor_are_counted_until_they_end(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdin is not None
        assert supervisor.stdout is not None
        worker = int(supervisor.stdout.readline())
        assert left(WorkerLocks(tmp_path)) == []  # it lives
        supervisor.kill()
        supervisor.wait()
        locks = WorkerLocks(tmp_path)
        own = locks.lock_worker(5)
        assert left(locks) == left(WorkerLocks(tmp_path)) == [(70, True, True)]
        assert own is not None
        os.close(own)
        os.kill(worker, 0)
        supervisor.stdin.close()  # the worker's too
    await until(lambda: left(locks) == [])
    last = WorkerLocks(tmp_path)
    assert left(last) == []
    last.lock_worker(1)
    assert len([*tmp_path.iterdir()]) <= 5  # of ended processes there are none, nor hidden ones


def test_a_folder_that_cannot_be_written_counts_nobody_and_starts_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    locks = WorkerLocks(tmp_path / "file")
    assert (locks.lock_worker(5), left(locks)) == (None, [])


def test_foreign_files_in_the_folder_are_no_workers(tmp_path: Path) -> None:
    for name in ("x", "a-b-c", "a-1-2"):
        (tmp_path / name).write_text("")
    (tmp_path / "folder-1-2").mkdir()
    assert left(WorkerLocks(tmp_path)) == []
