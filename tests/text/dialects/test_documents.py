"""docs/models.md names every dialect, and no other."""

import re
from pathlib import Path

from worker.text.dialects.table import DIALECTS
from worker.text.dialects.tag_calls import TagCalls
from worker.text.grammar.tool_grammars import form_of

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


def test_the_page_about_models_names_each_dialect() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("| dialect | for example |")[2].partition("\n\n")[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`([\w.]+)`", row.split("|")[1])}
    assert named == {dialect.name for dialect in DIALECTS} | {"harmony"}


def test_the_page_says_which_calls_cannot_be_forced() -> None:
    sentence = PAGE.read_text(encoding="utf-8").partition("by a grammar. In ")[2].partition("calls cannot be forced")[0]
    unforced = {each.name for each in DIALECTS if form_of(each.name, names_arguments=True) is None}
    tags = {each.name for each in DIALECTS if isinstance(each, TagCalls)}
    named = set(re.findall(r"`([\w.]+)`", sentence))
    assert named - {"qwen3_coder"} == unforced - tags
    assert "qwen3_coder" in named
    assert tags - unforced == {"qwen3_coder"}
