"""Schemathesis: requests made from the gateway's own description, valid ones and others, at every route."""

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as XML
from importlib.metadata import version
from pathlib import Path

from tests.support.conformance.checks.checking import URL, write

_EXAMPLES = 30  # of each operation, besides those that the schema's bounds make
_REQUEST_S = 60  # far more than an answer of the longest kind takes
# 503: the queue is full, or no worker serves the model. 504: the request's own `deadline_s` has passed.
_CONFIG = '[checks]\nnot_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 503, 504, 529]\n'


def main() -> None:
    """Run it, and print a line for each operation."""
    write("version", version("schemathesis"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "schemathesis.toml").write_text(_CONFIG, "utf-8")
        ran = subprocess.run(_command(folder), cwd=folder, capture_output=True, text=True)
        report = folder / "report.xml"
        if not report.exists():
            sys.exit(f"schemathesis wrote no report: {ran.stdout[-800:]}{ran.stderr[-800:]}")
        for case in XML.parse(report).getroot().iter("testcase"):
            _write_case(case)


def _command(folder: Path) -> list[str]:
    return [
        str(Path(sys.executable).parent / "schemathesis"), "--config-file", str(folder / "schemathesis.toml"),
        "run", f"{URL}/openapi.json",
        "--checks", "not_a_server_error", "--mode", "all", "--phases", "examples,coverage,fuzzing",
        "--max-examples", str(_EXAMPLES), "--request-timeout", str(_REQUEST_S), "--continue-on-failure",
        "--report", "junit", "--report-junit-path", str(folder / "report.xml"), "--no-color",
    ]  # fmt: skip


def _write_case(case: XML.Element) -> None:
    wrong = [element for kind in ("failure", "error") for element in case.iter(kind)]
    call = f"fuzz: {case.get('name', '?')}"
    if wrong:
        write("fail", call, (wrong[0].get("message") or wrong[0].text or "failed")[:600])
    else:
        write("pass", call)


if __name__ == "__main__":
    main()
