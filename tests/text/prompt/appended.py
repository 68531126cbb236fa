"""Conversations that go on, and how far the prompt of a longer one begins with that of a shorter one."""

import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.text.conversations import Said, assistant, call, calling, numbered, result, system, user

LOOK: Said = {"type": "function", "function": {"name": "look", "description": "Look at it."}}


@dataclass(frozen=True)
class Turns:
    """A conversation. `ends`: its messages at each request of an answer."""

    said: list[Said]
    ends: list[int]


def turns(dice: random.Random, *, tools: bool, systems: bool) -> Turns:
    """Return two to four questions, each with its calls, results and answer, and system messages in between."""
    numbers, ids = numbered(), (f"a{number:08}" for number in range(100))  # as Mistral's templates demand
    said, ends = list[Said](), list[int]()

    def words() -> str:
        return " ".join(next(numbers) for _ in range(dice.randint(1, 3)))

    def maybe_system() -> None:
        if systems and dice.random() < 0.4:
            said.append(system(words()))

    if dice.random() < 0.7:
        said.append(system(words()))
    for _ in range(dice.randint(2, 4)):
        said.append(user(words()))
        maybe_system()
        while tools and dice.random() < 0.5:
            ends.append(len(said))
            called = [next(ids) for _ in range(dice.randint(1, 2))]
            text = {"content": words()} if dice.random() < 0.3 else {}
            said.append(calling(*(call(id, f'{{"about": "{words()}"}}') for id in called), **text))
            said.extend(result(id, words()) for id in called)
            maybe_system()
        ends.append(len(said))
        said.append(assistant(words()))
        maybe_system()
    return Turns(said, ends)


def without_later_systems(turns: Turns) -> Turns:
    """Return the same questions, calls and answers."""
    kept = [at for at, message in enumerate(turns.said) if at == 0 or message["role"] != "system"]
    return Turns([turns.said[at] for at in kept], [sum(at < end for at in kept) for end in turns.ends])


async def partings(turns: Turns, render: Callable[[list[Said]], Awaitable[str]]) -> dict[int, tuple[str, str]]:
    """Return the requests, by number, whose prompts part from the one before within a text of that one, with both
    prompts from there on. `render` returns the prompt of messages."""
    found, before = dict[int, tuple[str, str]](), ""
    for number, end in enumerate(turns.ends):
        text = await render(turns.said[:end])
        *_, last = [0, *(match.end() for match in re.finditer(r"w\d+\.", before))]
        if not text.startswith(before[:last]):
            parts = next(at for at in range(last) if text[at : at + 1] != before[at])
            found[number] = before[parts:last], text[parts : parts + 200]
        before = text
    return found


async def ours(turns: Turns, render: Callable[[list[Said]], Awaitable[str]]) -> dict[int, tuple[str, str]]:
    """Return the `partings` that the template does not make by itself, without later system messages."""
    of_template = await partings(without_later_systems(turns), render)
    return {number: found for number, found in (await partings(turns, render)).items() if number not in of_template}
