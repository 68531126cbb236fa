"""What runs without `--all`."""

import pytest
from hypothesis import settings
from mlx_lm.models.cache import make_prompt_cache

from models import tiny_vision
from tests.engine import tiny
from tests.selection import ALIKE, Case, chosen, examples


def cases(test: str, *families: str, **others: object) -> list[Case]:
    return [Case.of(test, {"family": family, **others}) for family in families]


def run(listed: list[Case]) -> list[str]:
    return [dict(case.parameters)["family"] for case, runs in zip(listed, chosen(listed), strict=True) if runs]  # type: ignore[misc]


def test_of_families_with_caches_alike_the_first_runs() -> None:
    assert run(cases("test", "gpt_oss", "gemma3", "llama", "gemma3n", "deepseek_v32")) == [
        "gemma3",
        "llama",
        "deepseek_v32",
    ]


def test_a_kind_of_cache_runs_in_each_test_that_lists_one_of_its_families() -> None:
    assert run(cases("one", "gemma3", "gpt_oss") + cases("another", "gpt_oss", "gemma3n")) == ["gemma3", "gpt_oss"]


def test_other_parameters_all_run() -> None:
    assert run(cases("test", "llama", "qwen3", step_s=1.0) + cases("test", "llama", "qwen3", step_s=0.1)) == [
        "llama",
        "llama",
    ]


@pytest.mark.parametrize(
    "families",
    [
        ("llama",),
        ("llama", "gemma3"),
        ("llama", "gemma3", "mamba2", "qwen3_5"),
        ("llama", "falcon_h1", "deepseek_v32"),  # the others' caches are like nobody's
    ],
)
@pytest.mark.parametrize("values", [1, 2, 3, 5])
def test_each_family_and_each_value_run_but_not_each_with_each(families: tuple[str, ...], values: int) -> None:
    listed = [case for value in range(values) for case in cases("test", *families, step_s=value)]
    by_default = [case for case, runs in zip(listed, chosen(listed), strict=True) if runs]
    assert {case.only({"family"}) for case in by_default} == {case.only({"family"}) for case in listed}
    assert {case.without({"family"}) for case in by_default} == {case.without({"family"}) for case in listed}
    assert len(by_default) == max(len(families), values)


def test_a_value_that_belongs_to_its_family_runs() -> None:
    """As in rows of (family, expected)."""
    assert run(cases("test", "llama", expected=1) + cases("test", "qwen3", expected=2)) == ["llama", "qwen3"]


def cache_classes(family: str) -> set[str]:
    caches = make_prompt_cache(tiny.network(family))
    return {f"{type(each).__name__} of {[*map(type, getattr(each, 'caches', []))]}" for each in caches}


@pytest.mark.parametrize("line", ALIKE, ids=lambda line: line[0])
def test_families_of_a_line_have_the_same_cache_classes(line: tuple[str, ...]) -> None:
    families = {*tiny.EVERY_FAMILY, *tiny.ONLY_MLX_VLM}
    assert set(line) <= {*families, *tiny_vision.CONFIGS}
    assert len({frozenset(cache_classes(family)) for family in line if family in families}) <= 1


def test_every_cache_class_of_a_family_runs_by_default() -> None:
    by_default = run(cases("test", *tiny.FAMILIES))
    assert {name for family in tiny.FAMILIES for name in cache_classes(family)} == {
        name for family in by_default for name in cache_classes(family)
    }


def test_all_examples_run_with_all_and_at_least_one_without() -> None:
    with_all = settings().max_examples == 100
    assert [examples(number) for number in (3, 10, 600)] == ([3, 10, 600] if with_all else [1, 1, 60])
    assert examples(10, by_default=4) == (10 if with_all else 4)
