"""Every name that we borrow from transformers. `tests/engine/test_upstream_transformers.py` holds each. Written against
transformers 5.23.0. Its `apply_chat_template(sanitize_control_tokens=True)` is built of these functions: alone it
returns no text, and we need the text beside the tokens."""

from transformers.tokenization_utils_tokenizers import TokenizersBackend
from transformers.utils.chat_template_utils import (
    _CONTROL_TOKEN_END,
    _CONTROL_TOKEN_START,
    encode_marked_chat,
    mark_control_tokens,
)

CONTROL_TOKEN_START, CONTROL_TOKEN_END = _CONTROL_TOKEN_START, _CONTROL_TOKEN_END

__all__ = [
    "CONTROL_TOKEN_END",
    "CONTROL_TOKEN_START",
    "TokenizersBackend",
    "encode_marked_chat",
    "mark_control_tokens",
]
