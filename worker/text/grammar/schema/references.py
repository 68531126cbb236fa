"""Resolves the references within a schema, and gives their targets names."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from worker.text.grammar.schema.unsupported import UnsupportedKeyword, quoted

DATA = frozenset({"const", "enum", "default", "examples"})
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})  # schemas by name


@dataclass(frozen=True, slots=True)
class _Target:
    """The schema that a reference points to."""

    name: str  # in the `$defs` of the rewritten schema
    schema: Any
    place: str  # JSON pointer, for errors


class References:
    """The references of one schema. A reference to another schema is refused."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._found = dict[str, _Target]()  # by the text of the reference
        self._names = dict[str, str]()  # by the target's place
        self._anchors: dict[str, tuple[Any, str]] | None = None
        self._own = root["$id"].rstrip("#") if isinstance(root, dict) and isinstance(root.get("$id"), str) else ""

    def target(self, reference: Any, at: str) -> _Target:
        """Resolve a `$ref` of the schema at `at`. Raises `UnsupportedKeyword`."""
        if not isinstance(reference, str):
            raise UnsupportedKeyword(f"{at}/$ref", "a reference must be a string; write it as #/$defs/name")
        if reference not in self._found:
            schema, place = self._resolve(reference, f"{at}/$ref")
            name = self._names.setdefault(place, f"d{len(self._names)}")
            self._found[reference] = _Target(name, schema, place)
        return self._found[reference]

    def _resolve(self, reference: str, at: str) -> tuple[Any, str]:
        before, _, fragment = reference.partition("#")
        if before and before != self._own:
            raise UnsupportedKeyword(at, f"{quoted(reference)} is not within this schema; copy its target into $defs")
        if self._known_anchors().get(""):
            raise UnsupportedKeyword(at, "references are not supported if an inner schema has an $id; remove that")
        if fragment and not fragment.startswith("/"):
            found = self._known_anchors().get(unquote(fragment))
            if found is None:
                raise UnsupportedKeyword(at, f"no schema has the anchor {quoted(fragment)}; correct it")
            return found
        return self._follow_pointer(unquote(fragment), at), f"#{unquote(fragment)}"

    def _follow_pointer(self, pointer: str, at: str) -> Any:
        found = self._root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            match found:
                case dict() if key in found:
                    found = found[key]
                case list() if key.isascii() and key.isdigit() and int(key[:9]) < len(found):
                    found = found[int(key[:9])]
                case _:
                    raise UnsupportedKeyword(at, f"#{quoted(pointer)} does not exist; correct it")
        return found

    def _known_anchors(self) -> dict[str, tuple[Any, str]]:
        """Return the schemas that have an `$anchor`, by its name; under "" one that has an `$id`, except the root."""
        if self._anchors is None:
            self._anchors = dict(_anchored(self._root))
        return self._anchors


def members(schema: Any, at: str, references: References) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (JSON pointer, schema) of each schema directly within one, and of the target of its `$ref`; of properties
    those first that it requires. Raises `UnsupportedKeyword`."""
    required = schema.get("required")
    needed = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    for keyword, value in schema.items():
        found = list[tuple[str, Any]]()
        if keyword == "$ref":
            target = references.target(value, at)
            found = [(target.place, target.schema)]
        elif keyword in DATA or keyword in ("$defs", "definitions"):
            continue  # a definition matters if something refers to it
        elif keyword in NAMED and isinstance(value, dict):
            names = sorted(value, key=lambda name: name not in needed)
            found = [(f"{at}/{keyword}/{name}", value[name]) for name in names]
        elif isinstance(value, list):
            found = [(f"{at}/{keyword}/{place}", each) for place, each in enumerate(value)]
        else:
            found = [(f"{at}/{keyword}", value)]
        yield from ((pointer, each) for pointer, each in found if isinstance(each, dict))


def _anchored(root: Any) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Yield each anchor with its schema and its reference. JSON pointers would be long, so none are built."""
    for found in schemas_within(root):
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(found.get(key), str) and found[key]:
                yield found[key], (found, f"#{found[key]}")
        if found is not root and isinstance(found.get("$id"), str):
            yield "", (found, "#")


def schemas_within(root: Any) -> Iterator[dict[str, Any]]:
    """Yield each schema within one, itself included."""
    waiting: list[tuple[Any, bool]] = [(root, True)]
    while waiting:
        found, is_schema = waiting.pop()
        if isinstance(found, list):
            waiting += [(each, True) for each in found]
        elif isinstance(found, dict):
            if is_schema:
                yield found
            waiting += [
                (each, not (is_schema and key in NAMED))
                for key, each in found.items()
                if not (is_schema and key in DATA)
            ]
