"""Every name borrowed from transformers, and from tokenizers, on which it stands.
`tests/engine/upstream/test_transformers.py` checks each. Written against transformers 5.23.0. Its
`apply_chat_template(sanitize_control_tokens=True)` is built from these functions; on its own it returns no text, and we
need the text as well as the tokens."""

from jinja2.meta import find_undeclared_variables
from tokenizers import Tokenizer, normalizers
from transformers.tokenization_utils_tokenizers import TokenizersBackend
from transformers.utils.chat_template_utils import (
    _CONTROL_TOKEN_END,
    _CONTROL_TOKEN_START,
    _compile_jinja_template,
    encode_marked_chat,
    mark_control_tokens,
)

CONTROL_TOKEN_START, CONTROL_TOKEN_END = _CONTROL_TOKEN_START, _CONTROL_TOKEN_END


def variables_of(template: str) -> set[str]:
    """Return the names of the variables that a chat template reads. Raises what compiling it raises."""
    return find_undeclared_variables(_compile_jinja_template(template).environment.parse(template))


__all__ = [
    "CONTROL_TOKEN_END",
    "CONTROL_TOKEN_START",
    "Tokenizer",
    "TokenizersBackend",
    "encode_marked_chat",
    "mark_control_tokens",
    "normalizers",
    "variables_of",
]
