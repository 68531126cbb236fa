import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from sluice.log_lines import LineFormatter, escaped, set_up_logging

FORGED = "x\n2026-01-01 00:00:00,000 I sluice.queue: job y finished"


@pytest.fixture
def out() -> Iterator[io.StringIO]:
    logger, stream = logging.getLogger("test.lines"), io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter("%(levelname).1s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False  # a lone surrogate is more than pytest's own capture can send on
    yield stream
    logger.propagate = True
    logger.removeHandler(handler)


@pytest.mark.parametrize("text", [FORGED, "a\rb", "a\x1b[2Jb", "a\u2028b", "a\x85b", "a\x00b"])
def test_a_client_s_text_stays_on_its_line(out: io.StringIO, text: str) -> None:
    logging.getLogger("test.lines").warning("job %s failed", text)
    (line,) = out.getvalue().splitlines()
    assert line.startswith("W test.lines: job ")
    assert line.isprintable()


def test_a_traceback_is_indented_so_that_no_error_s_text_looks_like_a_record(out: io.StringIO) -> None:
    try:
        raise ValueError(FORGED)
    except ValueError:
        logging.getLogger("test.lines").exception("job %s failed", "a")
    first, *traceback = out.getvalue().splitlines()
    assert first == "E test.lines: job a failed"
    assert all(line.startswith("  ") for line in traceback)
    assert "ValueError: x" in out.getvalue()


def test_a_message_of_megabytes_is_shortened(out: io.StringIO) -> None:
    logging.getLogger("test.lines").warning("job %s failed", "x" * 1_000_000)
    assert out.getvalue().startswith("W test.lines: job xxx")
    assert out.getvalue().endswith("... (1,000,011 characters)\n")
    assert len(out.getvalue()) < 5000


def test_a_byte_that_is_no_utf_8_is_escaped() -> None:
    assert escaped("a\udcffb") == "a\\udcffb"


def test_ordinary_text_is_left_as_it_is() -> None:
    assert escaped("né 🙂 日本語 \\n 100 %") == "né 🙂 日本語 \\n 100 %"


def test_the_worker_logs_that_way(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.Logger("root")
    monkeypatch.setattr(logging, "root", root)
    monkeypatch.setattr(logging.getLogger("sluice"), "level", logging.NOTSET)
    set_up_logging("sluice", "INFO")
    assert [type(handler.formatter) for handler in root.handlers] == [LineFormatter]


@pytest.mark.parametrize(
    ("logger", "level", "shown"),
    [
        ("sluice", "DEBUG", ["sluice.gateway DEBUG", "sluice.gateway INFO", "httpx WARNING"]),
        ("sluice", "INFO", ["sluice.gateway INFO", "httpx WARNING"]),
        ("sluice", "ERROR", []),
        ("sluice.gateway", "INFO", ["sluice.gateway INFO", "httpx WARNING"]),
    ],
)
def test_what_libraries_log_is_shown_if_it_is_a_warning(logger: str, level: str, shown: list[str]) -> None:
    records = [(name, each) for name in ("sluice.gateway", "httpx") for each in ("DEBUG", "INFO", "WARNING")]
    calls = (
        f"logging.getLogger({name!r}).log(logging.{each}, 'it says {name} {each}')"
        for name, each in records
        if (name, each) != ("sluice.gateway", "WARNING")
    )
    setup = f"from sluice.log_lines import set_up_logging; set_up_logging({logger!r}, {level!r})"
    script = "\n".join(["import logging", setup, *calls])
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert [line.partition("it says ")[2] for line in ran.stderr.splitlines()] == shown


def test_json_has_an_object_for_each_record_with_its_fields_and_utc_time() -> None:
    script = """
import logging
from sluice.log_lines import set_up_logging
set_up_logging("sluice", "INFO", "json", worker="w", model="m")
log = logging.getLogger("sluice.queue")
log.info("job %s failed", "a\\nb\\ud800", extra={"job": "a", "queue_s": 0.5})
log.info("x" * 5_000)
try:
    1 / 0
except ZeroDivisionError:
    log.exception("lost")
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    first, long, failed = map(json.loads, ran.stderr.splitlines())
    age = datetime.now(UTC) - datetime.fromisoformat(first.pop("time"))
    assert timedelta(0) <= age < timedelta(minutes=1)
    common = {"logger": "sluice.queue", "level": "INFO", "worker": "w", "model": "m"}
    assert first == {**common, "message": "job a\nb\ud800 failed", "job": "a", "queue_s": 0.5}
    assert len(long["message"]) < 4_100
    assert failed["traceback"].endswith("ZeroDivisionError: division by zero")
