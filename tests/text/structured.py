"""JSON schemas as clients send them, and random walks through what a guide allows."""

import random
from typing import Any

from worker.request import GrammarState

Schema = dict[str, Any]

_PATTERNS = ("^[a-z]{2,5}$", "^[A-Z][a-z]{1,4}( [A-Z]\\.)?$", "^(red|green|blue)-[0-9]{1,3}$", "^\\d{4}/\\w?$", "x.?y")
_FORMATS = ("date", "time", "date-time", "ipv4", "uuid")


def schema(seed: int) -> Schema:
    """One that bounds its strings and arrays, so that a short answer can satisfy it."""
    dice = random.Random(seed)
    definitions = {name: _any(dice, 1, ()) for name in dice.sample(("Colour", "size", "a-b"), dice.randint(0, 2))}
    root = dice.choice((_object, _object, _object, _array, _any))(dice, 3, tuple(definitions))
    return {**root, "$defs": definitions} if definitions else root


def _any(dice: random.Random, depth: int, names: tuple[str, ...]) -> Schema:
    kinds = [_string, _string, _number, _integer, _choice, _plain]
    if depth:
        kinds += [_object, _object, _array, _either]
    if names:
        kinds += [_reference]
    return dice.choice(kinds)(dice, depth - 1, names)


def _object(dice: random.Random, depth: int, names: tuple[str, ...]) -> Schema:
    keys = dice.sample(("a", "name", "größe", 'quo"te', "with space", "n_1", "日本"), dice.randint(1, 3))
    found: Schema = {
        "type": "object",
        "properties": {key: _any(dice, depth, names) for key in keys},
        "required": [key for key in keys if dice.random() < 0.6],
        "additionalProperties": False,
    }
    if dice.random() < 0.1:
        found["patternProperties"] = {"^z[0-9]$": {"type": "integer"}}
    return found


def _array(dice: random.Random, depth: int, names: tuple[str, ...]) -> Schema:
    found: Schema = {"type": "array", "items": _any(dice, depth, names), "maxItems": dice.randint(1, 3)}
    if dice.random() < 0.3:
        found["minItems"] = 1
    if dice.random() < 0.2:
        found["prefixItems"] = [_any(dice, 0, names)]
    return found


def _either(dice: random.Random, depth: int, names: tuple[str, ...]) -> Schema:
    return {"anyOf": [_any(dice, depth, names) for _ in range(dice.randint(2, 3))]}


def _reference(dice: random.Random, depth: int, names: tuple[str, ...]) -> Schema:
    return {"$ref": f"#/$defs/{dice.choice(names)}"}


def _string(dice: random.Random, depth: int, names: tuple[str, ...]) -> Schema:
    match dice.randrange(3):
        case 0:
            return {"type": "string", "pattern": dice.choice(_PATTERNS), "maxLength": 12}
        case 1:
            return {"type": "string", "format": dice.choice(_FORMATS)}
    least = dice.randint(0, 2)
    return {"type": "string", "minLength": least, "maxLength": least + dice.randint(0, 6)}


def _integer(dice: random.Random, depth: int, names: tuple[str, ...]) -> Schema:
    least = dice.randint(-200, 100)
    found: Schema = {"type": "integer", "minimum": least, "exclusiveMaximum": least + dice.randint(12, 500)}
    return found | ({"multipleOf": dice.choice((2, 5))} if dice.random() < 0.3 else {})


def _number(dice: random.Random, depth: int, names: tuple[str, ...]) -> Schema:
    least = round(dice.uniform(-5, 5), dice.randint(0, 2))
    return {"type": "number", "exclusiveMinimum": least, "maximum": round(least + dice.choice((0.5, 3, 120)), 2)}


def _choice(dice: random.Random, depth: int, names: tuple[str, ...]) -> Schema:
    values = ["one", "zwei", "trois 🎈", 'a "b" \\ c', 4, -1.5, None, True, [1, "x"], {"k": []}]
    return dice.choice(({"enum": dice.sample(values, 3)}, {"const": dice.choice(values)}))


def _plain(dice: random.Random, depth: int, names: tuple[str, ...]) -> Schema:
    return {"type": dice.choice(("boolean", "null", ["boolean", "null"]))}


def allowed(guide: GrammarState, vocab: int) -> list[int]:
    mask = guide.bitmask()
    assert mask is not None
    assert len(mask) % 4 == 0
    return [token for token in range(vocab) if mask[token // 8] >> token % 8 & 1]


def walk(guide: GrammarState, ends: set[int], vocab: int, dice: random.Random, urges: list[list[int]]) -> list[int]:
    """An answer of what the guide allows, drawn evenly, but for its end and some words that it has an urge to say.
    It gives up after some hundred tokens."""
    said = list[int]()
    while len(said) < 500:
        may = allowed(guide, vocab)
        if ends & set(may) and (ends >= set(may) or dice.random() < 0.5):
            return said
        word = dice.choice(urges) if urges and dice.random() < 0.2 else [dice.choice([t for t in may if t not in ends])]
        for token in word:
            if token not in allowed(guide, vocab):
                break
            guide.accept(token)
            said.append(token)
    return []
