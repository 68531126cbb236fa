"""Rewrites keywords about properties by name.

llguidance has no `propertyNames`: the allowed names become `properties`, or one pattern in `patternProperties`, and no
other properties are allowed.
"""

from collections.abc import Callable, Iterable
from typing import Any

from worker.text.grammar.schema.disjoint import Disjointness, kinds
from worker.text.grammar.schema.patterns import Pattern
from worker.text.grammar.schema.regex import UnsupportedPattern, contains, union
from worker.text.grammar.schema.unsupported import Budget, Schema, UnsupportedKeyword, quoted

Rewrite = Callable[[Any, str], Any]
KEYWORDS = ("properties", "patternProperties", "additionalProperties", "propertyNames")
_FOR_NAMES = {
    "type", "const", "enum", "pattern", "minLength", "maxLength", "allOf", "$ref",
    "title", "description", "default", "examples", "$comment",
}  # fmt: skip


def pattern_of(text: Any, at: str, steps: Budget | None = None) -> Pattern:
    """Parse a client's pattern. `at`: its JSON pointer. Raises `UnsupportedKeyword`."""
    if not isinstance(text, str):
        raise UnsupportedKeyword(at, "a pattern must be a string; correct it")
    try:
        return Pattern(text, steps)
    except UnsupportedPattern as error:
        raise UnsupportedKeyword(at, f"the pattern {quoted(text)} is not supported: {error}") from error


def written_pattern(text: Any, at: str) -> str:
    """Return a pattern of strings in llguidance's form. Raises `UnsupportedKeyword`."""
    pattern = pattern_of(text, at)
    try:
        return pattern.written()
    except UnsupportedPattern as error:
        raise UnsupportedKeyword(at, f"the pattern {quoted(text)} is not supported: {error}") from error


def rewrite_properties(schema: Schema, at: str, rewrite: Rewrite, proofs: Disjointness, steps: Budget) -> Schema:
    """Return the keywords that replace the schema's own. `rewrite` rewrites a property's schema.

    Raises `UnsupportedKeyword`, and `BudgetExceeded`.
    """
    found = _Properties(schema, at, rewrite, steps)
    try:
        if "propertyNames" in schema:
            found.limit(_Names(schema["propertyNames"], f"{at}/propertyNames", proofs, steps))
        return found.written()
    except UnsupportedPattern as error:
        raise UnsupportedKeyword(at, f"a pattern of its properties' names is not supported: {error}") from error


class _Properties:
    def __init__(self, schema: Schema, at: str, rewrite: Rewrite, steps: Budget) -> None:
        self._at = at
        self._has_names = "properties" in schema
        self._steps = steps
        self._named = {
            name: rewrite(each, f"{at}/properties/{name}") for name, each in _by_name(schema, "properties", at).items()
        }
        self._patterns = [
            (pattern_of(text, f"{at}/patternProperties", steps), rewrite(each, f"{at}/patternProperties/{text}"))
            for text, each in _by_name(schema, "patternProperties", at).items()
        ]
        self._disputed = union(*(pattern.disputed for pattern, _ in self._patterns))
        self._rest = rewrite(schema.get("additionalProperties", True), f"{at}/additionalProperties")

    def limit(self, names: "_Names") -> None:
        """Leave only the properties that `propertyNames` allows."""
        if names.allows_any:
            return
        self._named = {name: value for name, value in self._named.items() if names.allow(name)}
        if names.listed is not None:
            allowed = dict.fromkeys([*self._named, *filter(names.allow, names.listed)])
            self._named, self._has_names = {name: self._of(name) for name in allowed}, True
        elif self._rest is not False or self._patterns:
            self._limit_by(names)
            return
        self._patterns, self._rest = [], False

    def _limit_by(self, names: "_Names") -> None:
        if self._patterns:
            raise UnsupportedKeyword(names.at, "it is not supported with patternProperties; put it into their patterns")
        if self._named and self._rest not in (True, {}):
            instead = "use patternProperties, and additionalProperties: false"
            raise UnsupportedKeyword(
                names.at, f"it is not supported with properties and additionalProperties; {instead}"
            )
        self._patterns, self._rest = [(names.pattern(), self._rest)], False

    def _of(self, name: str) -> Any:
        """Return the schema of a property: all that `properties` and matching patterns have, else that of the rest."""
        self._check_undisputed([name], self._at)
        found = [self._named[name]] if name in self._named else []
        found += [each for pattern, each in self._patterns if pattern.matches(name)]
        if len(found) > 1:
            return {"allOf": found}
        return found[0] if found else self._rest

    def written(self) -> Schema:
        found = Schema()
        if self._has_names:
            found["properties"] = self._named
        if self._patterns:
            found["patternProperties"] = self._written_patterns()
        if self._rest not in (True, {}):
            found["additionalProperties"] = self._rest
        return found

    def _written_patterns(self) -> Schema:
        found = Schema()
        for text, value in self._spelled():
            found[text] = {"allOf": [found[text], value]} if text in found else value
        return found

    def _spelled(self) -> list[tuple[str, Any]]:
        """Return each pattern with its schema, in the reading that is strict in both dialects.

        Without other restrictions that is the wider reading: more names get the schema. Otherwise it is the narrower
        one: fewer names are allowed.
        """
        if self._rest in (True, {}):
            return [(pattern.written(possibly=True), value) for pattern, value in self._patterns]
        self._check_undisputed(self._named, f"{self._at}/patternProperties")
        if self._rest is not False and self._disputed:
            instead = "write out their classes, or use additionalProperties: false"
            raise UnsupportedKeyword(
                f"{self._at}/patternProperties", f"\\w and similar classes differ between validators; {instead}"
            )
        less = self._disputed if len(self._patterns) > 1 else ()
        return [(pattern.written(less=less), value) for pattern, value in self._patterns]

    def _check_undisputed(self, names: Iterable[str], at: str) -> None:
        for name in names if self._disputed else ():
            self._steps.take(len(name) + 1)
            if any(contains(self._disputed, character) for character in name):
                which = f"validators differ on whether a pattern matches {quoted(name)}"
                raise UnsupportedKeyword(at, f"{which}; write out its classes")


def _by_name(schema: Schema, keyword: str, at: str) -> Schema:
    value = schema.get(keyword, {})
    if not isinstance(value, dict):
        raise UnsupportedKeyword(f"{at}/{keyword}", "it must be an object of schemas; correct it")
    return value


class _Names:
    """Names that `propertyNames` allows: `allows_any`, or `listed` names, or names that match patterns and lengths."""

    def __init__(self, value: Any, at: str, proofs: Disjointness, steps: Budget) -> None:
        self.at, self._steps = at, steps
        all_of = proofs.flat([value])
        self.listed: list[str] | None = [] if all_of is None or "string" not in kinds(all_of) else None
        self._patterns, self._sizes = list[Pattern](), list[tuple[int, int | None]]()
        for schema in all_of or []:
            self._take(schema)
        if all_of is not None and self.listed is None:
            values = proofs.listed(all_of)
            self.listed = None if values is None else [value for value in values if isinstance(value, str)]
        self._allowed = None if self.listed is None else set(self.listed)
        self.allows_any = self.listed is None and not self._patterns and not self._sizes

    def _take(self, schema: Schema) -> None:
        if unknown := sorted(schema.keys() - _FOR_NAMES):
            known = "enum, const, pattern, minLength and maxLength"
            raise UnsupportedKeyword(f"{self.at}/{unknown[0]}", f"it is not supported for names; use {known}")
        if "pattern" in schema:
            self._patterns.append(pattern_of(schema["pattern"], f"{self.at}/pattern", self._steps))
        minimum, maximum = (size(schema, keyword, self.at) for keyword in ("minLength", "maxLength"))
        if minimum or maximum is not None:
            self._sizes.append((minimum or 0, maximum))

    def allow(self, name: str) -> bool:
        self._steps.take(1 + len(self._sizes))
        matched = all(pattern.matches(name) for pattern in self._patterns)
        fits = all(
            minimum <= len(name) and (maximum is None or len(name) <= maximum) for minimum, maximum in self._sizes
        )
        return matched and fits and (self._allowed is None or name in self._allowed)

    def pattern(self) -> Pattern:
        if len(self._patterns) + len(self._sizes) > 1:
            raise UnsupportedKeyword(
                self.at, "only one pattern, or one range of lengths, is supported; put them into one pattern"
            )
        if self._patterns:
            return self._patterns[0]
        ((minimum, maximum),) = self._sizes
        return Pattern(rf"^[\s\S]{{{minimum},{'' if maximum is None else maximum}}}$")


def size(schema: Schema, keyword: str, at: str) -> int | None:
    """Return the value of a keyword that must be a whole number from 0; None if it is not set."""
    value = schema.get(keyword)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise UnsupportedKeyword(f"{at}/{keyword}", f"{quoted(value)} is not a whole number from 0; correct it")
    return value
