"""What `scripts/package` builds, installed into fresh environments as its formula for Homebrew installs it."""

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sluice import __version__
from tests.support.stack import ROOT, TINY_CHAT

pytestmark = [pytest.mark.slow, pytest.mark.registry]
_TIMEOUT_S = 540  # MLX and transformers are fetched


def run(*command: str | Path, cwd: Path, fails: bool = False) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=_TIMEOUT_S)
    assert fails or done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    run(ROOT / "scripts" / "package", folder, "https://example.org/sluice/", cwd=folder)
    return folder


def test_wheels_sources_and_a_formula_are_built(built: Path) -> None:
    assert sorted(file.name for file in built.iterdir()) == [
        "constraints.txt",
        f"mlx_sluice-{__version__}-py3-none-any.whl",
        f"mlx_sluice-{__version__}.tar.gz",
        f"mlx_sluice_worker-{__version__}-py3-none-any.whl",
        f"mlx_sluice_worker-{__version__}.tar.gz",
        "sluice.rb",
    ]


def test_the_formula_names_the_files_with_their_checksums(built: Path) -> None:
    formula = (built / "sluice.rb").read_text()
    named = re.findall(r'url "https://example.org/sluice/([^"]+)".*?sha256 "(\w+)"', formula, re.DOTALL)
    assert len(named) == 3
    for name, checksum in named:
        assert hashlib.sha256((built / name).read_bytes()).hexdigest() == checksum
    assert f'version "{__version__}"' in formula
    assert "@" not in formula.replace("python@3.12", "").replace("begins with @", "")
    if ruby := shutil.which("ruby"):
        assert run(ruby, "-c", built / "sluice.rb", cwd=built) == "Syntax OK\n"


def test_what_the_formula_installs_into_a_fresh_environment_runs(built: Path, tmp_path: Path) -> None:
    formula = (built / "sluice.rb").read_text()
    commands = re.findall(r"^    system (.*?)\n(?=    \w)", formula, re.MULTILINE | re.DOTALL)
    assert len(commands) == 2
    places = {
        'Formula["python@3.12"].opt_bin/"python3.12"': sys.executable,
        'libexec/"bin/python"': str(tmp_path / "bin" / "python"),
        "libexec": str(tmp_path),
    }
    for command in commands:
        words = [word.strip() for word in command.split(", ")] if "\n" not in command else re.split(r",\s+", command)
        run(*(places.get(word, word.strip('"')) for word in words), cwd=built)
    sluice = tmp_path / "bin" / "sluice"
    assert run(sluice, "--version", cwd=tmp_path) == f"sluice {__version__}\n"
    assert "MLX device" in run(
        sluice, "doctor", "--model", TINY_CHAT, cwd=tmp_path, fails=True
    )  # no Redis need run here
    for command in ("capture", "replay", "serve", "worker", "batch run", "why"):
        assert run(sluice, *command.split(), "--help", cwd=tmp_path)
    assert "tiny" in run(sluice, "check", TINY_CHAT, cwd=tmp_path)


def test_the_client_s_wheel_alone_runs_the_command(built: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path, cwd=tmp_path)
    (wheel,) = built.glob("mlx_sluice-*.whl")
    run(
        tmp_path / "bin" / "python",
        "-m",
        "pip",
        "install",
        "-q",
        "-c",
        ROOT / "constraints.txt",
        f"{wheel}[cli]",
        cwd=tmp_path,
    )
    sluice = tmp_path / "bin" / "sluice"
    assert run(sluice, "--version", cwd=tmp_path) == f"sluice {__version__}\n"
    assert "--redact" in run(sluice, "capture", "--help", cwd=tmp_path)
    refused = subprocess.run([sluice, "doctor"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (refused.returncode, "the worker is not installed here" in refused.stderr) == (2, True)
