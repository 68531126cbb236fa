"""Tests of the demo."""

import io
from xml.etree import ElementTree

import pytest
from rich.console import Console

from scripts.demo import Chat, Grid, chats, closing_table, picture
from tests.support.stack import ROOT


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (40, 100)])
def test_all_chats_fit_on_the_screen_at_once_and_show_how_they_end(width: int, height: int) -> None:
    shown = [Chat(str(k), [], text=" ".join(map(str, range(100)))) for k in range(8)]
    console = Console(width=width, height=height, force_terminal=True, color_system=None, file=io.StringIO())
    lines = ["".join(segment.text for segment in line) for line in console.render_lines(Grid(shown), pad=False)]
    assert len(lines) <= height
    assert sum(line.count("98 99") for line in lines) == 8


def ended(title: str, text: str = "", **timings: float) -> Chat:
    usage = {"prompt_tokens": 573, "completion_tokens": 110}
    return Chat(title, [], text=text, result={"usage": usage, "sluice": {"timings": timings, "rows_mean": 10.5}})


def closing_row(**timings: float) -> str:
    chat = ended("long text", **timings)
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(closing_table([chat]))
    return console.export_text().splitlines()[-2]


def test_the_table_of_a_slow_machine_fits_too() -> None:
    row = closing_row(queue_s=0.9999, ttft_s=99.94, tokens_per_s=1234.5)
    assert row.split() == "long text interactive 573 110 1.0 s 99.9 s 1234 10.5".split()


def words_of(svg: str) -> str:
    texts = (
        "".join(element.itertext()) for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")
    )
    return " ".join(" ".join(texts).split())


def test_the_picture_shows_the_end_of_each_answer_and_the_table() -> None:
    shown = [ended(str(k), " ".join(map(str, range(100))), queue_s=0.1, ttft_s=1, tokens_per_s=9) for k in range(8)]
    words = words_of(picture(shown, "8 chats"))
    assert (words.count("98 99"), words.count("573 110 100 ms 1.0 s 9 10.5")) == (8, 8)


def test_the_picture_in_the_documents_is_of_these_chats_and_small() -> None:
    svg = (ROOT / "docs" / "demo.svg").read_text()
    assert len(svg) < 200_000
    assert "http" not in svg.replace("http://www.w3.org/", "").replace("https://www.textualize.io", "")
    words = words_of(svg)
    assert [chat.title for chat in chats() if f"{chat.title} stop" not in words] == []
