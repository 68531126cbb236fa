"""What is checked of each program: the columns of the table."""

import itertools
import re
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from tests.support.conformance.programs.installed import Installed
from tests.support.conformance.programs.programs import Call, Turn
from tests.support.conformance.programs.record import Connection
from tests.support.conformance.programs.sandbox import Home, Ran
from tests.support.conformance.programs.script import Step, message
from tests.support.conformance.programs.stage import Played, Stage

_TURN_S = 120.0  # of a turn: programs start within seconds, and the player answers at once
_LEAVE_S = 5.0  # within which the job of a program that has left is cancelled
_POLL_S = 0.1
_INTO_ANSWER_S = 0.5  # long answers take seconds
_NOTE = "note.txt"  # a file of the project whose text the tool of a program reads
_TAIL_TOKENS = 8  # of a prompt: the beginning of the answer, which the next prompt writes with the answer
_FILLER_WORDS = 9_000  # 80 KB, since an argument may have 128 KiB; some 50,000 tokens
_FILLED_TURNS = 4  # together beyond the context
_TELLS = re.compile(r"context|too long|too large|token", re.IGNORECASE)
_TOLERATED = re.compile(r"^(HEAD|GET) ")  # requests that ask whether something is there


@dataclass(frozen=True, slots=True)
class Failed(Exception):
    """A check failed; the reason is the cell's text."""

    reason: str


class NotApplicable(Exception):
    """The program has nothing that this check drives."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long a session is, and how long the silence before a first token."""

    turns: int = 12  # enough for a reminder that a program adds after ten
    silent_s: float = 40.0  # beyond the time-outs of half a minute that HTTP clients have


@dataclass(slots=True)
class Run:
    """A check of one program: its home, and the processes that it talks to."""

    installed: Installed
    stage: Stage
    home: Home
    sizes: Sizes
    begun: bool = False
    connections: list[Connection] = field(default_factory=list)
    read: int = 0  # lines of the player's log before this check

    def command(self, *steps: Step, image: Path | None = None, text: str = "") -> list[str]:
        """Return the command for the next turn."""
        turn = Turn(f"{message(*steps)}{text}", self.begun, image)
        self.begun = True
        return self.installed.command(turn, self.home.folder)

    def turn(self, *steps: Step, image: Path | None = None, text: str = "", timeout_s: float = _TURN_S) -> Ran:
        """Run a turn to its end."""
        ran = self.home.run(self.command(*steps, image=image, text=text), timeout_s)
        self.connections += self.stage.recorder.take()
        return ran

    def played(self) -> list[Played]:
        """Return the prompts of this check that had a script."""
        return [played for played in self.stage.played()[self.read :] if played.step is not None]

    def refusals(self) -> list[str]:
        """Return the requests that were refused or failed, with the first words of the answers."""
        self.connections += self.stage.recorder.take()
        return [line for connection in self.connections for line in connection.refusals()]

    def received(self, word: str) -> bool:
        """Return True if an answer had this word, a letter or more in each event."""
        return any(word in connection.text() for connection in self.connections)

    def expect(self, ran: Ran, *said: str) -> None:
        """Raise `Failed` unless the program has printed these words."""
        missing = [word for word in said if word not in ran.output + ran.errors]
        if not missing:
            return
        why = "; ".join(self.refusals()[-2:])
        ended = "did not end" if ran.code is None else f"ended with {ran.code}"
        raise Failed(f"{ended} without {missing[0]!r}{'; ' + why if why else ''}; it printed: {ran.last_words}")


def _word() -> str:
    return f"w{secrets.token_hex(4)}"


def start(run: Run) -> None:
    """A turn with a short answer, without a request that is refused."""
    word = _word()
    ran = run.turn(Step(say=f"All is well, {word}."))
    run.expect(ran, word)
    if ran.code != 0:
        raise Failed(f"answered, but ended with {ran.code}; it printed: {ran.last_words}")
    if refused := [line for line in run.refusals() if not _TOLERATED.match(line)]:
        raise Failed(f"answered, but: {'; '.join(refused[:2])}")


def turn(run: Run) -> None:
    """Thoughts, a long answer, and a second turn."""
    first, last = _word(), _word()
    run.expect(run.turn(Step(think="Let me think.", say=first, repeat=300)), f"{first} 0", f"{first} 299")
    if not run.installed.program.goes_on:
        return
    run.expect(run.turn(Step(think="Again.", say=f"And {last}.")), last)
    if run.played()[-1].turn != 2:
        raise Failed("the second turn had not the first one in its prompt")


def silence(run: Run) -> None:
    """An answer whose first token takes a while, as that of a long prompt does."""
    word = _word()
    silent_s = run.sizes.silent_s
    run.expect(run.turn(Step(say=word, silent_s=silent_s), timeout_s=silent_s + _TURN_S), word)


def tools(run: Run) -> None:
    """One call, then two at once: their results reach the model."""
    shell = _shell(run)
    secret, echo = _word(), _word()
    (run.home.project / _NOTE).write_text(secret, encoding="utf-8")
    read, done = shell(f"cat {_NOTE}"), Step(say="Done: {results}.")
    run.expect(run.turn(Step(think="I read it.", calls=(read,)), done), secret)
    run.expect(run.turn(Step(say="Two.", calls=(read, shell(f"echo {echo}"))), done), secret, echo)


def mistakes(run: Run) -> None:
    """Calls of an unknown tool, and with arguments that are no JSON: the model learns of it and goes on."""
    name, _ = _shell(run)("true")
    wrong: dict[str, Call] = {
        "an unknown tool": ("no_such_tool", {"a": 1}),
        "broken arguments": (name, '{"command": ["cat", '),
    }
    for what, call in wrong.items():
        word = _word()
        ran = run.turn(Step(say="Wrong.", calls=(call,)), Step(say=f"I see, {word}."))
        try:
            run.expect(ran, word)
        except Failed as failed:
            raise Failed(f"after {what}: {failed.reason}") from None


def images(run: Run) -> None:
    """A picture reaches the model."""
    if not run.installed.program.takes_images:
        raise NotApplicable
    picture, word = run.home.project / "picture.png", _word()
    Image.new("RGB", (64, 48), (200, 30, 30)).save(picture)
    run.expect(run.turn(Step(say=f"Red, {word}."), image=picture), word)
    if not any(played.images for played in run.played()):
        raise Failed("no prompt had the picture")


def overflow(run: Run) -> None:
    """A conversation beyond the context: the program shortens it and goes on, or says what is wrong and ends."""
    word = _word()
    run.expect(run.turn(Step(say=word)), word)
    filler = " ".join(f"word{k}" for k in range(_FILLER_WORDS))
    for _ in range(_FILLED_TURNS):
        word = _word()
        ran = run.turn(Step(say=word), text=f"\n{filler}")
        said = ran.output + ran.errors
        if ran.code is None:
            raise Failed(f"did not end: {'; '.join(run.refusals()[-2:])}; it printed: {ran.last_words}")
        if word in said or _TELLS.search(said):
            continue
        refused = "; ".join(run.refusals()[-2:])
        if run.received(word):
            raise Failed(f"was shortened and answered, but the answer is not printed: {refused}; {ran.last_words}")
        raise Failed(f"was neither shortened nor reported: {refused}; {ran.last_words}")


def worker(run: Run) -> None:
    """kill -9 of the worker in the middle of an answer, which comes whole all the same from another one."""
    _restarted(run, run.stage.kill_worker)


def gateway(run: Run) -> None:
    """kill -9 of the gateway in the middle of an answer, for which the program asks again."""
    try:
        _restarted(run, run.stage.kill_gateway)
    except Failed as failed:
        again = len(run.played()) > 1
        raise failed if again else Failed(f"did not ask again: {failed.reason}") from None


def _restarted(run: Run, kill: Callable[[], None]) -> None:
    word = _word()
    program = run.home.start(run.command(Step(say=word, repeat=60, token_s=0.01)))
    _wait_until(lambda: bool(run.played()), "no prompt came")
    time.sleep(_INTO_ANSWER_S)
    kill()
    run.expect(program.end(_TURN_S), f"{word} 59")


def cancel(run: Run) -> None:
    """A program that is interrupted: its job is cancelled, and the conversation goes on."""
    word, before = _word(), len(run.stage.stopped())
    program = run.home.start(run.command(Step(say="long", repeat=4_000, token_s=0.02)))
    _wait_until(lambda: bool(run.played()), "no prompt came")
    time.sleep(_INTO_ANSWER_S)
    program.signal(signal.SIGINT)
    time.sleep(1.0)
    program.end(0.1)
    _wait_until(lambda: len(run.stage.stopped()) > before, "its job was not cancelled", _LEAVE_S)
    run.begun = False
    run.expect(run.turn(Step(say=word)), word)


def session(run: Run) -> None:
    """Turns with calls of tools: each prompt begins with all of the one before."""
    if not run.installed.program.goes_on:
        raise NotApplicable
    shell = run.installed.program.shell
    for number in range(run.sizes.turns):
        word = _word()
        calls = (shell(f"echo {word}-{number}"),) if shell else ()
        steps = [Step(think="Next.", say="I look.", calls=calls), Step(think="So.", say=f"Turn {number}: {word}.")]
        ran = run.turn(*(steps if shell else steps[1:]), timeout_s=_TURN_S)
        run.expect(ran, f"Turn {number}: {word}")
    if lost := lost_prefixes(run.played()):
        raise Failed(f"{len(lost)} of {len(run.played()) - 1} prompts lost their prefix: {lost[0]}")


def lost_prefixes(played: Sequence[Played]) -> list[str]:
    """Return the prompts of a conversation that do not begin with the whole one before. Prompts beside it, as those for
    its title, quote a message of it, and so have a turn that was before."""
    conversation = list[Played]()
    for each in played:
        if not conversation or (each.turn, each.step) > (conversation[-1].turn, conversation[-1].step):
            conversation.append(each)
    return [
        f"turn {after.turn}, answer {after.step}: {after.found_tokens} of {before.prompt_tokens} tokens"
        for before, after in itertools.pairwise(conversation)
        if after.found_tokens < before.prompt_tokens - _TAIL_TOKENS
    ]


def _shell(run: Run) -> Callable[[str], Call]:
    if run.installed.program.shell is None:
        raise NotApplicable
    return run.installed.program.shell


def _wait_until(ready: Callable[[], bool], otherwise: str, timeout_s: float = _TURN_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            raise Failed(otherwise)
        time.sleep(_POLL_S)


CHECKS: dict[str, Callable[[Run], None]] = {
    check.__name__: check
    for check in (start, turn, tools, mistakes, images, silence, session, overflow, cancel, worker, gateway)
}
QUICK = ("start", "turn", "tools", "mistakes")
