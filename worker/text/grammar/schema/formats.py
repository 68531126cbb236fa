r"""Patterns of the formats of JSON Schema, in clients' syntax. A string has a format if all of its patterns match.

Each allows a part of its format: what programs read without a disagreement. llguidance (1.9) has formats too, but its
dates have 29 days in every February, and its hosts and mailboxes have any length.
"""

from functools import cache

from worker.text.grammar.schema.patterns import Pattern

_DAYS = (
    "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])"
)
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # without 0000, which Python cannot read
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = f"(?:{_YEAR}-(?:{_DAYS})|(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
# Nanoseconds are the finest that programs read. A leap second ends a day in UTC, so it is written with that offset.
_FRACTION = r"(?:\.[0-9]{1,9})?"
_CLOCK = f"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{_FRACTION}(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = f"(?:{_CLOCK}|23:59:60{_FRACTION}(?:[zZ]|[+-]00:00))"

# Labels of hosts have 63 characters (RFC 1123), and no -- in third place: what follows it would have to be valid
# Punycode, which no regular expression checks (RFC 5891).
_LABEL = "[{0}](?:[{0}-]?[{0}]|[{0}-]{{2}}[{0}]|[{0}-](?:[{0}][{0}-]|-[{0}])[{0}-]{{0,58}}[{0}])?"
_ASCII_LABEL = _LABEL.format("A-Za-z0-9")
_HOST = rf"{_ASCII_LABEL}(?:\.{_ASCII_LABEL})*"
# Letters that are valid in names of hosts in any place, in composed form (RFC 5892): Latin, Greek, Cyrillic, kana, Han,
# Hangul. In Punycode each takes up to five characters, so ten are within the 63, and three labels within the 253.
_LETTERS = "ß-öø-ÿά-ώа-яぁ-ゖァ-ヺ一-龥가-힣"
_IDN_LABEL = f"(?:{_LABEL.format('a-z0-9')}|[a-z0-9{_LETTERS}]{{1,10}})"
_IDN_HOST = rf"{_IDN_LABEL}(?:\.{_IDN_LABEL}){{0,2}}"

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_H16 = "[0-9A-Fa-f]{1,4}"
_LS32 = f"(?:{_H16}:{_H16}|{_IPV4})"
_IPV6 = "|".join([
    f"(?:{_H16}:){{6}}{_LS32}",
    f"::(?:{_H16}:){{5}}{_LS32}",
    *(f"(?:(?:{_H16}:){{0,{4 - after}}}{_H16})?::(?:{_H16}:){{{after}}}{_LS32}" for after in range(4, -1, -1)),
    f"(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}",
    f"(?:(?:{_H16}:){{0,6}}{_H16})?::",
])  # fmt: skip

_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_MAILBOX = r"^{0}(?:\.{0})*@(?:{1})$"
_IDN_ATOM = rf"[A-Za-z0-9!#$%&'*+/=?^_`{{|}}~{_LETTERS}-]+"

_UCS = r"\u00A0-\uD7FF\uF900-\uFDCF\uFDF0-\uFFEF\u{10000}-\u{1FFFD}\u{20000}-\u{2FFFD}"  # RFC 3987, the planes in use
_POINTER = "(?:/(?:[^/~]|~[01])*)*"
_VARIABLE = r"(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})(?:\.?(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2}))*(?::[1-9][0-9]{0,3}|\*)?"


def _reference(letters: str, *, relative: bool) -> str:
    """Return the pattern of RFC 3986, with these letters beside its own. `relative`: also without a scheme."""
    own = rf"A-Za-z0-9._~!$&'()*+,;=\-{letters}"
    escaped = "%[0-9A-Fa-f]{2}"
    part = f"(?:[{own}:@]|{escaped})"
    host = rf"(?:\[(?:{_IPV6}|[vV][0-9A-Fa-f]+\.[A-Za-z0-9._~!$&'()*+,;=:\-]+)\]|(?:[{own}]|{escaped})*)"
    authority = f"//(?:(?:[{own}:]|{escaped})*@)?{host}(?::[0-9]*)?(?:/{part}*)*"
    absolute = f"/(?:{part}+(?:/{part}*)*)?"
    tail = rf"(?:\?(?:{part}|[/?])*)?(?:#(?:{part}|[/?])*)?"
    rootless = f"{part}+(?:/{part}*)*"
    scheme = "[A-Za-z][A-Za-z0-9+.-]*:"
    whole = f"{scheme}(?:{authority}|{absolute}|{rootless})?"
    if relative:
        named = f"(?:[{own}@]|{escaped})+(?:/{part}*)*"
        whole = f"(?:(?:{scheme})?(?:{authority}|{absolute})?|{scheme}{rootless}|{named})"
    return f"^{whole}{tail}$"


_WHOLE_NAME = "^[ -~]{1,253}$"
_PATTERNS = {
    "date-time": (f"^{_DATE}[tT]{_TIME}$",),
    "time": (f"^{_TIME}$",),
    "date": (f"^{_DATE}$",),
    "duration": (
        "^P(?:[0-9]+W|(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)?"
        "(?:T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S))?)$",
        "^P[T0-9]",
    ),
    "email": (
        _MAILBOX.format(_ATOM, rf"{_HOST}|\[{_IPV4}\]"),
        "^[!-?A-~]{1,64}@[!-?A-~]{1,253}$",
    ),
    "idn-email": (
        _MAILBOX.format(_IDN_ATOM, _IDN_HOST),
        f"^(?:[!-?A-~]{{1,64}}|[!-?A-~{_LETTERS}]{{1,21}})@",  # 64 bytes
    ),
    "hostname": (f"^{_HOST}$", _WHOLE_NAME),
    "idn-hostname": (f"^{_IDN_HOST}$",),
    "ipv4": (f"^{_IPV4}$",),
    "ipv6": (f"^(?:{_IPV6})$",),
    "uuid": ("^[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$",),
    "uri": (_reference("", relative=False),),
    "uri-reference": (_reference("", relative=True),),
    "iri": (_reference(_UCS, relative=False),),
    "iri-reference": (_reference(_UCS, relative=True),),
    "uri-template": (
        rf"^(?:[!#$&(-;=?-\[\]_a-z~{_UCS}]|%[0-9A-Fa-f]{{2}}|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*$",
    ),
    "json-pointer": (f"^{_POINTER}$",),
    "relative-json-pointer": (f"^(?:0|[1-9][0-9]{{0,8}})(?:#|{_POINTER})$",),
}  # fmt: skip
FORMATS = tuple(_PATTERNS)


@cache
def patterns(format: str) -> tuple[Pattern, ...]:
    """Return the patterns of one of `FORMATS`."""
    return tuple(map(Pattern, _PATTERNS[format]))


@cache
def written_patterns(format: str) -> tuple[str, ...]:
    """Return the patterns of one of `FORMATS` in llguidance's form."""
    return tuple(pattern.written() for pattern in patterns(format))
