"""The files that the two distributions install."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

import sluice
import worker
from tests.support.stack import ROOT


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return both wheels by distribution name, built from a copy of the checkout: setuptools leaves files behind."""
    checkout, folder = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("wheels")
    for top in ("schemas", "sluice", "worker"):
        shutil.copytree(ROOT / top, checkout / top, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
    subprocess.run([*build, "./sluice", "."], cwd=checkout, check=True, capture_output=True, timeout=300)
    return {file.name.split("-")[0]: file for file in folder.glob("*.whl")}


def packages(wheel: Path) -> set[str]:
    names = {name.split("/")[0] for name in ZipFile(wheel).namelist()}
    return {name for name in names if not name.endswith(".dist-info")}


@pytest.mark.slow
def test_the_client_installs_one_package_and_the_worker_its_own_two(wheels: dict[str, Path]) -> None:
    assert {name: packages(wheel) for name, wheel in wheels.items()} == {
        "mlx_sluice": {"sluice"},
        "mlx_sluice_worker": {"schemas", "worker"},
    }


@pytest.mark.slow
def test_every_module_and_script_is_in_a_wheel(wheels: dict[str, Path]) -> None:
    shipped = {name for wheel in wheels.values() for name in ZipFile(wheel).namelist()}
    files = (file for top in ("schemas", "sluice", "worker") for file in (ROOT / top).rglob("*"))
    shipped_kinds = {".py", ".lua", ".typed", ".html", ".css", ".js", ".svg"}
    wanted = {file.relative_to(ROOT).as_posix() for file in files if file.suffix in shipped_kinds}
    assert wanted - shipped == set()


@pytest.mark.slow
def test_the_client_alone_can_be_imported_and_says_its_version(wheels: dict[str, Path], tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*install, str(wheels["mlx_sluice"])], check=True, capture_output=True, timeout=120)
    top = {each.name for each in tmp_path.iterdir() if each.is_dir() and each.name != "bin"}
    assert {name for name in top if not name.endswith(".dist-info")} == {"sluice"}
    code = "import sys; sys.modules.update(typer=None, rich=None); from sluice.cli import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}", "--version"],
        capture_output=True, text=True, cwd=tmp_path, timeout=60,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, f"sluice {sluice.__version__}\n"), ran.stderr


def test_the_client_s_distribution_lists_every_package() -> None:
    listed = tomllib.loads((ROOT / "sluice/pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = [file.parent.relative_to(ROOT) for file in (ROOT / "sluice").rglob("__init__.py")]
    assert sorted(listed) == sorted(".".join(folder.parts) for folder in folders)


def test_the_worker_s_distribution_asks_for_the_client_s_and_the_client_s_for_none_of_ours() -> None:
    asked = dict[str, set[str]]()
    for file in ("pyproject.toml", "sluice/pyproject.toml"):
        project = tomllib.loads((ROOT / file).read_text())["project"]
        extras = [name for each in project.get("optional-dependencies", {}).values() for name in each]
        ours = {name for name in [*project.get("dependencies", ()), *extras] if name.startswith("mlx-sluice")}
        asked[project["name"]] = {name.partition("[")[0] for name in ours} - {project["name"]}
    assert asked == {"mlx-sluice-worker": {"mlx-sluice"}, "mlx-sluice": set()}


@pytest.mark.parametrize("file", ["Dockerfile", "scripts/setup", "pyproject.toml", "docs/operations.md"])
def test_no_install_of_the_worker_asks_an_index_for_the_client(file: str) -> None:
    """Both come from the checkout in one command; else pip looks for the client on the index, where it is not."""
    commands = re.findall(r"pip install (?:[^\n#`]|\\\n)*", (ROOT / file).read_text())
    assert commands
    assert not [each for each in commands if re.search(r"\.\[", each) and "./sluice" not in each]


def test_both_distributions_have_one_version() -> None:
    assert sluice.__version__ == worker.__version__
