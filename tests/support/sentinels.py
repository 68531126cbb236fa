"""Sentinels as child processes, which watch servers of `tests.support.stack`."""

import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import redis

from tests.support.stack import Server, free_port, server_binary

SERVICE = "main"


def replica_of(primary: Server) -> Server:
    """Return a server that copies another one once it is started."""
    return Server(args=("--replicaof", "127.0.0.1", str(primary.port)))


def is_copied(replica: Server) -> bool:
    """Return True if the replica has what its primary has, and receives what follows."""
    with redis.Redis(port=replica.port) as client:
        return bool(client.info("replication")["master_link_status"] == "up")


class Sentinels:
    """Sentinels on free ports that take a primary for dead after a second. Use it in a `with` block."""

    def __init__(self, primary: Server, *, count: int = 3, replicas: int = 1, port: int | None = None) -> None:
        """`port`: on which the primary is to be reached, if it is not its own."""
        self._primary_port = port or primary.port
        self._count, self._replicas = count, replicas
        self.ports = [free_port() for _ in range(count)]
        self._folder = tempfile.TemporaryDirectory(prefix="sluice-sentinels-", ignore_cleanup_errors=True)
        self._processes = list[subprocess.Popen[bytes]]()
        self.url = f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in self.ports)}/{SERVICE}/0"

    def __enter__(self) -> Self:
        try:
            for port in self.ports:
                self._start(port)
            self.until(self._all_know_all)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._folder.cleanup()

    def _start(self, port: int) -> None:
        folder = Path(self._folder.name, str(port))
        folder.mkdir()
        file = folder / "sentinel.conf"  # a sentinel rewrites it
        file.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {folder}\nlogfile {folder}/log\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {self._primary_port} {self._count // 2 + 1}\n"
            f"sentinel down-after-milliseconds {SERVICE} 1000\nsentinel failover-timeout {SERVICE} 5000\n",
            encoding="utf-8",
        )
        command = [server_binary(), str(file), "--sentinel"]
        self._processes.append(subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL))

    def primary_port(self) -> int:
        """Return the port of the server that the first sentinel names as the primary."""
        return int(self.ask("GET-MASTER-ADDR-BY-NAME", SERVICE)[1])

    def fail_over(self) -> None:
        """Have the replica promoted, without any death, and wait until the former primary copies it: until then that
        takes jobs, which it forgets."""
        before = self.primary_port()
        self.ask("FAILOVER", SERVICE)
        self.until(lambda: self.primary_port() != before)
        self.until(self._all_copy)

    def _all_copy(self) -> bool:
        with redis.Redis(port=self.ports[0]) as client:
            replicas = client.sentinel_slaves(SERVICE)
        told = {(each["role-reported"], each["master-link-status"]) for each in replicas}
        return told == {("slave", "ok")}

    def name(self, primary: Server) -> None:
        """Have the first sentinel name another server as the primary, of which the servers are not told."""
        self.ask("REMOVE", SERVICE)
        self.ask("MONITOR", SERVICE, "127.0.0.1", str(primary.port), "1")

    def ask(self, *command: str, number: int = 0) -> list[bytes]:
        """Send a sentinel a command, and return its answer as it came."""
        with redis.Redis(port=self.ports[number]) as client:
            answer: list[bytes] = client.execute_command("SENTINEL " + command[0], *command[1:])
            return answer

    def _all_know_all(self) -> bool:
        return all(self._knows_all(number) for number in range(self._count))

    def _knows_all(self, number: int) -> bool:
        with redis.Redis(port=self.ports[number]) as client:
            state = client.sentinel_masters()[SERVICE]
        others, replicas = state["num-other-sentinels"], state["num-slaves"]
        return bool(others == self._count - 1 and replicas == self._replicas and state["flags"] == "master")

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition is true. Raises TimeoutError."""
        deadline = time.monotonic() + 60
        while True:
            try:
                if condition():
                    return
            except redis.RedisError:
                pass  # it has not started yet
            if time.monotonic() > deadline:
                raise TimeoutError("the sentinels do not agree")
            time.sleep(0.05)
