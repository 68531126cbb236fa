"""The commands of docs/deployment.md: a Redis with TLS and users, a password that changes, and a restore."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis

from sluice import SyncClient
from tests.end_to_end.test_cli import run_here
from tests.end_to_end.test_one_env_file import running
from tests.end_to_end.test_start import until
from tests.end_to_end.test_up import ENV
from tests.support.stack import ROOT, TINY_CHAT, free_port, server_binary
from tests.support.tls import TlsPort

PAGE = (ROOT / "docs" / "deployment.md").read_text()
ROLES = ("worker", "gateway", "backend", "operator", "monitoring")
HELLO = [{"role": "user", "content": "Count to 3."}]


def commands(heading: str) -> list[str]:
    """Return the commands of a section's console blocks, without their comments."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [line.partition("  #")[0].strip() for line in re.findall(r"^\$ (.*)$", section, re.MULTILINE)]


class Queue:
    """The folder that `secure` writes, and its server on a port of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.secure()
        for file in (*folder.glob("*.env"), folder / "redis.conf"):
            file.write_text(file.read_text().replace("6379", str(self.port)))

    def secure(self) -> None:
        done = subprocess.run(
            [ROOT / "examples" / "redis" / "secure", "127.0.0.1", self.folder],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")

    def url(self, role: str) -> str:
        """Return a role's URL, for any working directory."""
        (found,) = re.findall(r"^SLUICE_REDIS_URL='(.*)'$", (self.folder / f"{role}.env").read_text(), re.MULTILINE)
        return str(found.replace("=ca.crt", f"={self.folder / 'ca.crt'}"))

    @property
    def admin(self) -> redis.Redis:
        secret = (self.folder / "admin.env").read_text().strip().removeprefix("REDISCLI_AUTH=")
        user = re.sub("//.*@", f"//admin:{secret}@", self.url("operator"))
        return redis.Redis.from_url(user, decode_responses=True)

    @contextmanager
    def served(self, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run the server with redis.conf; one that was built without TLS behind a port that takes it."""
        if self._starts_with_tls():
            with self._running("redis.conf", *options) as process:
                yield process
            return
        plain, conf = free_port(), (self.folder / "redis.conf").read_text()
        kept = [line for line in conf.splitlines() if not line.startswith(("tls-", "port "))]
        (self.folder / "plain.conf").write_text("\n".join([*kept, f"port {plain}"]))
        pem = self.folder / "both.pem"
        pem.write_text((self.folder / "redis.crt").read_text() + (self.folder / "redis.key").read_text())
        with self._running("plain.conf", *options) as process, TlsPort(self.port, plain, pem):
            yield process

    def _starts_with_tls(self) -> bool:
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [server_binary(), "redis.conf"], cwd=self.folder, stdout=subprocess.DEVNULL, timeout=1, check=False
            )
            return False
        return True

    @contextmanager
    def _running(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        with subprocess.Popen([server_binary(), *arguments], cwd=self.folder, stdout=subprocess.DEVNULL) as process:
            try:
                yield process
            finally:
                process.terminate()

    def answers(self) -> bool:
        with suppress(redis.exceptions.RedisError), self.admin as admin:
            return bool(admin.ping())
        return False


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    return Queue(tmp_path / "queue")


def test_the_script_prepares_a_server_for_each_role_and_nobody_else(queue: Queue) -> None:
    assert {file.name for file in queue.folder.glob("*.env")} == {"admin.env", *(f"{role}.env" for role in ROLES)}
    assert [file.name for file in queue.folder.iterdir() if file.stat().st_mode & 0o077] == []
    with queue.served():
        until(queue.answers)
        for role in ROLES:
            with redis.Redis.from_url(queue.url(role)) as user:
                assert user.ping()
                with pytest.raises(redis.exceptions.NoPermissionError):
                    user.flushall()
        wrong = (re.sub("//.*@", "//", queue.url("worker")), re.sub("ssl_ca_certs=[^&]*&", "", queue.url("worker")))
        for url in wrong:
            with pytest.raises(redis.exceptions.RedisError), redis.Redis.from_url(url) as nobody:
                nobody.ping()
        with queue.admin as admin:
            kept = {name: admin.config_get(name)[name] for name in ("maxmemory-policy", "appendonly", "appendfsync")}
            assert kept == {"maxmemory-policy": "noeviction", "appendonly": "yes", "appendfsync": "everysec"}


def test_a_strict_client_accepts_the_certificate(queue: Queue) -> None:
    strict = ["openssl", "verify", "-x509_strict", "-verify_ip", "127.0.0.1", "-CAfile", "ca.crt", "redis.crt"]
    done = subprocess.run(strict, cwd=queue.folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_script_again_renews_the_certificate_alone(queue: Queue) -> None:
    before = {file.name: file.read_text() for file in queue.folder.iterdir()}
    queue.secure()
    changed = {name for name, text in before.items() if (queue.folder / name).read_text() != text}
    assert changed == {"redis.crt", "redis.key", "ca.srl"}


@pytest.mark.parametrize("host", ["", "a b", "queue.example.com/0", "redis://queue"])
def test_the_script_refuses_what_is_no_host(host: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "examples" / "redis" / "secure", host, tmp_path / "q"], capture_output=True, check=False
    )
    assert (done.returncode, (tmp_path / "q").exists()) == (2, False)


@pytest.mark.slow
def test_a_worker_by_its_file_answers_and_a_password_is_changed_without_a_pause(queue: Queue, tmp_path: Path) -> None:
    mac = tmp_path / "mac"
    mac.mkdir()
    for role, copy in (("worker.env", ".env"), ("ca.crt", "ca.crt")):
        shutil.copy(queue.folder / role, mac / copy)
    (added,) = (line for line in commands("Redis with TLS and users") if line.startswith("echo SLUICE_MODEL="))
    added = re.sub("=[^ ]*", f"={TINY_CHAT}", added, count=1)
    subprocess.run(added, cwd=mac, shell=True, check=True)
    (rotation,) = re.findall(r"^\| a user's password \|(.*)\|$", PAGE, re.MULTILINE)
    given, _, taken = rotation.partition("change each `.env`")
    with queue.served():
        until(queue.answers)
        with running(mac, "worker") as (worker,), SyncClient(queue.url("backend")) as client, queue.admin as admin:
            long = {"messages": HELLO, "max_tokens": 1000, "logit_bias": {"0": -100, "2": -100}}
            job = client.submit(long, wait_worker_s=60).id
            assert client.result(job)["usage"]["completion_tokens"] == 1000
            (figure,) = re.findall(r"\*\*Memory\*\*: (\d+) bytes a token", PAGE)
            assert int(figure) / 2 < admin.memory_usage(f"sluice:log:{job}", samples=0) / 1000 <= int(figure)
            env = (mac / ".env").read_text()
            old = re.findall("//worker:(.*)@", env)[0]

            def administer(text: str) -> None:
                for command in re.findall(r"`((?:ACL|CLIENT) [^`]*)`", text):
                    admin.execute_command(*shlex.split(command.replace("NEW", "kumquat").replace("OLD", old)))

            administer(given)
            (mac / ".env").write_text(env.replace(old, "kumquat"))
            code, _, err = run_here(
                "workers", "restart", env={**ENV, "SLUICE_REDIS_URL": queue.url("operator")}, folder=mac
            )
            assert (code, "is back" in err) == (0, True), err
            administer(taken)
            assert client.result(client.submit(HELLO).id)["choices"]
            worker.check_runs()
            with pytest.raises(redis.exceptions.AuthenticationError), redis.Redis.from_url(queue.url("worker")) as user:
                user.ping()
        assert f"#{old}" not in (queue.folder / "users.acl").read_text()


def test_a_backup_is_restored_by_the_page_and_would_be_ignored_without(queue: Queue) -> None:
    with queue.served():
        until(queue.answers)
        with SyncClient(queue.url("backend")) as client, queue.admin as admin:
            job = client.submit(HELLO, model="nobody").id
            admin.execute_command("SAVE")  # what `redis-cli --rdb` fetches is this file
            shutil.copy(queue.folder / "dump.rdb", queue.folder / "queue.rdb")
    lines = commands("Backup and restore")
    assert [line.split()[0] for line in lines] == ["mv", "redis-server", "redis-cli", "redis-cli", "redis-cli"]
    subprocess.run(lines[0], cwd=queue.folder, shell=True, check=True)
    with queue.served(*shlex.split(lines[1])[2:]) as process:
        until(queue.answers)
        with queue.admin as admin, suppress(redis.exceptions.ConnectionError):
            admin.execute_command(*shlex.split(lines[2])[1:])
            done = {"aof_rewrite_in_progress": 0, "aof_enabled": 1}
            until(lambda: done.items() <= admin.info("persistence").items())
            admin.execute_command(*shlex.split(lines[4])[1:])
        process.wait(30)
    os.remove(queue.folder / "dump.rdb")
    with queue.served():
        until(queue.answers)
        with SyncClient(queue.url("backend")) as client:
            assert client.state(job) == "queued"
    shutil.rmtree(queue.folder / "appendonlydir")
    shutil.copy(queue.folder / "queue.rdb", queue.folder / "dump.rdb")
    with queue.served(), queue.admin as admin:
        until(queue.answers)
        assert admin.dbsize() == 0
