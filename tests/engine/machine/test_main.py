import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.engine.machine import __main__ as command


class Unlike(RuleBasedStateMachine):
    """A machine that finds a difference."""

    @initialize()
    def open(self) -> None:
        raise AssertionError("a difference")

    @rule()
    def step(self) -> None:
        pass


def test_a_round_is_printed_with_its_seed_and_its_events(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["1", "--family", "plain", "--seed", "3"])
    progress, events = capsys.readouterr().out.splitlines()
    assert (progress.startswith("plain: 1 of 1, "), progress.endswith(", seed 3")) == (True, True)
    assert "1 sequences" in events


def test_a_difference_names_the_command_that_finds_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(command.MACHINES, "plain", Unlike)  # type: ignore[arg-type]
    with pytest.raises(AssertionError) as raised:
        command.main(["60", "--family", "plain", "--seed", "3"])
    assert f"Run it again: {command.PROG} 50 --family plain --seed 3" in raised.value.__notes__


def test_sequences_are_shared_among_the_families() -> None:
    assert [*command._shares(5, ["plain", "window", "recurrent"])] == [("plain", 2), ("window", 2), ("recurrent", 1)]
    assert [*command._shares(1, ["plain", "window"])] == [("plain", 1)]


@pytest.mark.parametrize("arguments", [["0"], ["--family", "unknown"], ["--seed", "x"]])
def test_an_argument_that_cannot_be_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        command.main(arguments)
    assert raised.value.code == 2
