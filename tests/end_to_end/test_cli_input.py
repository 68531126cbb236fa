"""Text typed or pasted into `sluice chat`. No worker serves the model, so the requests stay in the queue."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.test_cli import Command, Terminal

_PASTE, _END = "\x1b[200~", "\x1b[201~"  # what a terminal writes around a pasted text


@pytest.fixture
def talk(redis_url: str, tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(redis_url, tmp_path, "chat", "--model", "nobody")
    yield terminal
    terminal.close()


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (f"{_PASTE}one\n\n  two\n/three\n{_END}\r", "one\n\n  two\n/three"),
        ("one\\\rtwo\\\rthree\r", "one\ntwo\nthree"),
        ('"""one\r\rtwo\r"""\r', "one\n\ntwo"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (f"see {_PASTE}one\ntwo{_END}!\r", "see one\ntwo!"),
                (f"{_PASTE}/reset\nis a command{_END}\r", "/reset\nis a command"),
                ('"""\rone\\\r /two"""\r', "one\\\n /two"),
                ('"""one"""\r', "one"),
            ]
        ),
    ],
)
def test_what_belongs_together_is_one_request(sluice: Command, talk: Terminal, typed: str, message: str) -> None:
    talk.until("> ")
    for line in typed.splitlines(keepends=True) if _PASTE not in typed else [typed]:
        talk.type(line)
        if _PASTE not in typed and line != typed.splitlines(keepends=True)[-1]:
            talk.until("... ")
    sluice.wait_for_request("nobody", message)


def test_lines_that_come_together_without_brackets_wait_for_an_enter_by_hand(sluice: Command, talk: Terminal) -> None:
    """A terminal without bracketed paste, or a Python with libedit."""
    talk.until("> ")
    talk.type("one\rtwo\rthree\r")
    for _ in range(3):
        talk.until("... ")
    talk.type("\r")
    sluice.wait_for_request("nobody", "one\ntwo\nthree")


def test_a_message_of_several_lines_is_dropped_by_ctrl_c(sluice: Command, talk: Terminal) -> None:
    talk.until("> ")
    talk.type('"""one\r')
    talk.until("... ")
    talk.interrupt_until("> ")
    talk.type("two\r")
    sluice.wait_for_request("nobody", "two")


def test_nobody_is_greeted_for_and_the_way_out_is_told(talk: Terminal) -> None:
    greeting = talk.until("> ")
    assert "no worker serves 'nobody'" in greeting
    assert "sluice worker --model FOLDER_OR_HUB_ID --name nobody" in " ".join(greeting.split())
    assert "connected to" not in greeting


def test_help_names_every_command_and_the_keys(talk: Terminal) -> None:
    talk.until("> ")
    talk.type("/help\r")
    shown = talk.until("\n> ")
    for name in ("/image FILE", "/system TEXT", "/reset", "/help", "/quit", '"""', "Ctrl-C"):
        assert f"  {name}  " in shown
