"""Choose the tests of a run without `--all`: one family for each kind of cache, and a share of the examples."""

import os
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings

# Families whose caches are of one kind: all of a line run with `--all`, without it the first that a test lists.
ALIKE = (
    ("llama", "qwen3", "qwen3_moe", "deepseek_v3"),  # keys and values of every token
    # a window beside full attention
    ("gemma3", "gpt_oss", "gemma3n", "gemma4 with experts", "gemma4", "llama_swa", "cohere2", "gemma4_text"),
    # both through mlx-vlm
    ("k2_horizon", "mistral_large3", "xing4_0"),
    ("cohere2_moe", "flint", "kolibri1", "step3p7"),
    # recurrent state beside full attention
    ("qwen3_5", "jamba", "kimi_linear", "qwen3_5_moe", "qwen3_next", "nemotron_h", "granitemoehybrid", "lfm2"),
    ("mamba2", "rwkv7", "mamba"),  # recurrent state alone
    ("qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "qwen2_vl", "mistral3", "pixtral"),  # images, and the first kind
)
_RANK = {family: (line[0], rank) for line in ALIKE for rank, family in enumerate(line)}

# Percent of a test's examples. On CI the examples are the same in every run, so a change is judged by its own failures;
# every other run draws new ones. A busy machine is slow, so no example has a deadline; the suite has its own limit.
_DERANDOMIZE = bool(os.environ.get("CI"))
settings.register_profile("default", deadline=None, derandomize=_DERANDOMIZE, max_examples=10)
settings.register_profile("all", deadline=None, derandomize=_DERANDOMIZE, max_examples=100)


def examples(number: int, *, by_default: int | None = None) -> int:
    """Return how many of a test's examples the loaded profile runs: `number` with `--all`, else a tenth of them, or
    `by_default` if a tenth is too few or takes too long."""
    share = settings().max_examples
    if share < 100 and by_default is not None:
        return by_default
    return max(1, number * share // 100)


@dataclass(frozen=True, slots=True)
class Case:
    """A test with its parameters, of which some name families."""

    test: str
    parameters: tuple[tuple[str, Hashable], ...]

    @classmethod
    def of(cls, test: str, parameters: Mapping[str, Any]) -> "Case":
        return cls(test, tuple((name, _comparable(value)) for name, value in sorted(parameters.items())))

    @property
    def rank(self) -> tuple[int, ...]:
        """Place of each family in its line of `ALIKE`."""
        return tuple(_RANK[value][1] for _, value in self.parameters if value in _RANK)

    @property
    def kind(self) -> "Case":
        """The same case for the first family of each line."""
        return Case(self.test, tuple((name, _RANK.get(value, (value, 0))[0]) for name, value in self.parameters))

    def only(self, names: Collection[str]) -> "Case":
        """Return the same case without the parameters of other names."""
        return Case(self.test, tuple(each for each in self.parameters if each[0] in names))

    def without(self, names: Collection[str]) -> "Case":
        """Return the same case without the parameters of these names."""
        return Case(self.test, tuple(each for each in self.parameters if each[0] not in names))


def chosen(cases: Iterable[Case]) -> list[bool]:
    """Return for each case if it runs without `--all`.

    Of families whose caches are of one kind the first of their line runs. Of families times other parameters each
    family runs, and each value of the others, but not each with each.
    """
    all_cases = list(cases)
    best = dict[Case, tuple[int, ...]]()
    for case in all_cases:
        best[case.kind] = min(case.rank, best.get(case.kind, case.rank))
    first = [case for case in all_cases if case.rank == best[case.kind]]
    by_test = dict[str, list[Case]]()
    for case in first:
        by_test.setdefault(case.test, []).append(case)
    run = {case for alike in by_test.values() for case in _paired(alike)}
    return [case in run for case in all_cases]


def _paired(cases: list[Case]) -> list[Case]:
    """Return as many cases of one test as have each family and each value of the others at least once; all of them if
    not every family is listed with every value."""
    # Of families: some are in no line of `ALIKE`.
    names = {name for case in cases for name, value in case.parameters if value in _RANK}
    families = list(dict.fromkeys(case.only(names) for case in cases))
    others = list(dict.fromkeys(case.without(names) for case in cases))
    if len({*cases}) != len(families) * len(others):
        return cases
    fewer = min(len(families), len(others))
    return [
        case for case in cases if (families.index(case.only(names)) - others.index(case.without(names))) % fewer == 0
    ]


def case_of(item: pytest.Item) -> Case:
    """Return the test of an item without its parameters, and these."""
    callspec = getattr(item, "callspec", None)
    return Case.of(item.nodeid.partition("[")[0], callspec.params if callspec else {})


def _comparable(value: Any) -> Hashable:
    return value if isinstance(value, str) else repr(value)
