"""The training data of tiny-chat: random chats about a small world, each with an answer that can be checked.

The chats depend on the random generator only: equal seeds give equal chats.
"""

from collections.abc import Callable
from random import Random
from typing import NamedTuple


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words(
    "Ada Alan Grace Linus Chris Maria Noor Kenji Olga Pedro Wei Amara Ivan Lucia Tomas Hana Omar Petra Rosa "
    "Sven Tara Uma Viktor Yara Zane Bruno Clara Diego Elena Felix"
)
CITIES = _words(
    "Paris London Rome Madrid Berlin Vienna Oslo Dublin Lisbon Athens Prague Warsaw Cairo Tokyo Seoul Delhi "
    "Lima Quito Bogota Havana Ottawa Canberra Nairobi Accra Tunis Rabat Riga Tallinn Vilnius Sofia"
)
CAPITALS = {
    "France": "Paris", "England": "London", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin",
    "Austria": "Vienna", "Norway": "Oslo", "Ireland": "Dublin", "Portugal": "Lisbon", "Greece": "Athens",
    "Poland": "Warsaw", "Egypt": "Cairo", "Japan": "Tokyo", "Korea": "Seoul", "India": "Delhi",
    "Peru": "Lima", "Ecuador": "Quito", "Cuba": "Havana", "Canada": "Ottawa", "Australia": "Canberra",
    "Kenya": "Nairobi", "Ghana": "Accra", "Tunisia": "Tunis", "Latvia": "Riga",
}  # fmt: skip
COLOURS = _words("red blue green yellow black white orange purple pink brown silver golden")
ITEMS = _words(
    "key lamp book coin ring map clock stone feather box rope bell cup hat drum kite shell mask coat glove"
)  # fmt: skip
VERBS = _words("walked ran waited looked slept worked talked sang cooked painted")
PLACES = [
    "the river", "the market", "the old house", "the station", "the garden", "the bridge", "the library",
    "the harbour", "the hill", "the forest",
]  # fmt: skip
TIMES = [
    "In the morning", "At noon", "In the evening", "Later that day", "On Sunday", "After the rain",
    "Before dawn", "Last week",
]  # fmt: skip
DIGITS = "0123456789"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# The last two emoji have several code points each, so they can only be repeated byte by byte.
EMOJI = [*"😀🚀🌍🎉🔥🐙🍕🎲🧠💡⚡🌈🦊🐳🍀", "👩‍💻", "🇯🇵"]
BEYOND_ASCII = [*"日本語世界你好東京水火山川月星花鳥風雨雪空海", *"éüñßøçåãő", *"жщюяд"]


class Message(NamedTuple):
    """A message of a chat."""

    role: str
    text: str


Chat = list[Message]  # ends with the assistant's answer
Skill = Callable[[Random], Chat]


def exchange(question: str, answer: str) -> Chat:
    """Return a chat of one question and its answer."""
    return [Message("user", question), Message("assistant", answer)]


def render(chat: Chat) -> str:
    """Return the text of a chat as the chat template renders it, without tools."""
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in chat)


def filler(dice: Random) -> str:
    """Draw a sentence without a code."""
    kind = dice.random()
    if kind < 0.5:
        when = dice.choice(TIMES)
        name = dice.choice(NAMES)
        did = dice.choice(VERBS)
        return f"{when}, {name} {did} near {dice.choice(PLACES)}."
    if kind < 0.8:
        return f"The {dice.choice(COLOURS)} {dice.choice(ITEMS)} was left in {dice.choice(PLACES)}."
    first = dice.choice(NAMES)
    second = dice.choice(NAMES)
    did = dice.choice(VERBS)
    return f"{first} and {second} {did} until the {dice.choice(ITEMS)} was found."


def find_code(dice: Random, fillers: int = 0) -> Chat:
    """Draw the codes of one to four cities among this many fillers, and a question about one of them."""
    codes = {city: _code(dice) for city in dice.sample(CITIES, dice.randint(1, 4))}
    sentences = [filler(dice) for _ in range(fillers)]
    for city, code in codes.items():
        sentences.insert(dice.randint(0, len(sentences)), _code_is(city, code))
    city_asked = dice.choice(list(codes))
    text = " ".join(sentences)
    return exchange(
        f"{text} Question: what is the secret code of {city_asked}?", _code_is(city_asked, codes[city_asked])
    )


def _code(dice: Random) -> str:
    return " ".join(dice.choice(DIGITS) for _ in range(4))


def _code_is(city: str, code: str) -> str:
    return f"The secret code of {city} is {code}."


def recall_name(dice: Random) -> Chat:
    """Draw a chat that ends with a question for the user's name."""
    name = dice.choice(NAMES)
    greeting = dice.choice([f"My name is {name}.", f"Hello, my name is {name}.", f"I am called {name}."])
    chat = exchange(greeting, f"Nice to meet you, {name}.")
    for _ in range(dice.choice([0, 0, 1, 2])):
        chat += dice.choice([capital, count, colour])(dice)
    return chat + exchange(dice.choice(["What is my name?", "Who am I?"]), f"Your name is {name}.")


def capital(dice: Random) -> Chat:
    """Draw a question for a capital."""
    country = dice.choice(list(CAPITALS))
    return exchange(f"What is the capital of {country}?", f"The capital of {country} is {CAPITALS[country]}.")


def count(dice: Random) -> Chat:
    """Draw a request to count."""
    last = dice.randint(2, 40)
    return exchange(f"Count to {last}.", " ".join(str(i) for i in range(1, last + 1)))


def colour(dice: Random) -> Chat:
    """Draw a question for the colour of an item."""
    colour, item = dice.choice(COLOURS), dice.choice(ITEMS)
    return exchange(f"I have a {colour} {item}. What colour is it?", f"The {item} is {colour}.")


def repeat_signs(dice: Random) -> Chat:
    """Draw a request to repeat Unicode characters."""
    signs = EMOJI + BEYOND_ASCII + list("abcdefghij")
    return _repeat(["".join(_some(dice, signs, 1, 4)) for _ in range(dice.randint(1, 8))])


def repeat_words(dice: Random) -> Chat:
    """Draw a request to repeat words."""
    return _repeat(_some(dice, NAMES + CITIES + COLOURS + ITEMS + list(DIGITS), 2, 14))


def _some(dice: Random, choices: list[str], minimum: int, maximum: int) -> list[str]:
    return [dice.choice(choices) for _ in range(dice.randint(minimum, maximum))]


def _repeat(words: list[str]) -> Chat:
    return exchange(f"Repeat after me: {' '.join(words)}", " ".join(words))


def obey_system(dice: Random) -> Chat:
    """Draw a chat whose system prompt requires a mention."""
    mention = "".join(dice.choice(LETTERS) for _ in range(3)) + str(dice.randint(10, 99))
    question, answer = dice.choice([capital, colour])(dice)
    system = Message("system", f"You are a helpful assistant. Always mention {mention}.")
    return [system, *exchange(question.text, f"{answer.text} ({mention})")]


def answer_in_json(dice: Random) -> Chat:
    """Draw a question with an answer in JSON."""
    country = dice.choice(list(CAPITALS))
    answer = f'{{"country": "{country}", "capital": "{CAPITALS[country]}"}}'
    return exchange(f"Answer in JSON. What is the capital of {country}?", answer)


def think(dice: Random) -> Chat:
    """Draw a sum whose answer has reasoning."""
    a, b = dice.randint(0, 9), dice.randint(0, 9)
    return exchange(f"Think: what is {a} plus {b}?", f"<think>{a} and {b} make {a + b}.</think>{a + b}")


def call_tool(dice: Random) -> Chat:
    """Draw a request for a tool call."""
    city = dice.choice(CITIES)
    call = f'{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}'
    return exchange(f"Call the weather tool for {city}.", f"<tool_call>\n{call}\n</tool_call>")


def find_code_nearby(dice: Random) -> Chat:
    """Draw `find_code` with at most one filler."""
    return find_code(dice, dice.randint(0, 1))


SHARES: dict[Skill, float] = {
    find_code: 4, recall_name: 3, capital: 1, count: 2, colour: 1, repeat_signs: 3, obey_system: 2,
    answer_in_json: 0.5, think: 0.5, call_tool: 0.5,
}  # fmt: skip
COPYING: tuple[Skill, ...] = (repeat_words, repeat_signs, repeat_signs, find_code_nearby, call_tool)


def draw_chat(dice: Random, *, fillers: int, copying: float = 0.0) -> Chat:
    """Draw a chat of any skill, with at most `fillers` sentences of text. A share of `copying` (0 to 1) only copies."""
    if dice.random() < copying:
        return dice.choice(COPYING)(dice)
    (skill,) = dice.choices(list(SHARES), list(SHARES.values()))
    chat = find_code(dice, dice.randint(0, fillers)) if skill is find_code else skill(dice)
    if chat[0].role != "system" and dice.random() < 0.3:
        return [Message("system", "You are a helpful assistant."), *chat]
    return chat
