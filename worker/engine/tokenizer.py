"""Implement `worker.text.tokenizer` with mlx-lm's tokenizer."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from functools import cached_property, partial
from typing import Any, TypeVar

from worker.engine.control_tokens import ControlTokens
from worker.engine.upstream.mlx_lm import (
    BPEStreamingDetokenizer,
    TokenizerWrapper,
)
from worker.engine.upstream.transformers import (
    CONTROL_TOKEN_START,
    Tokenizer,
    TokenizersBackend,
    normalizers,
    variables_of,
)
from worker.errors import JobFailure

T = TypeVar("T")

_BLANK = " \t\r\n▁"
# Changes that a text which is spelled letter by letter must not undergo.
_NORMALIZERS = (normalizers.NFC, normalizers.NFD, normalizers.NFKC, normalizers.NFKD, normalizers.Prepend)


class MLXTokenizer:
    """A model's tokenizer. The methods implement `Tokenizer` in `worker.text.tokenizer`, and are described there."""

    def __init__(self, wrapper: TokenizerWrapper, marker: str = "") -> None:
        """`marker`: text that stands for an image in a vision model's chat template."""
        self._wrapper = wrapper
        self._tokenizer = wrapper._tokenizer
        self._marker = marker
        self._backend = _backend(self._tokenizer)

    @cached_property
    def tokens(self) -> list[str]:
        """The vocabulary by id; "" for ids without a token."""
        vocabulary = self._tokenizer.get_vocab()
        tokens = [""] * (1 + max(vocabulary.values()))  # a vocabulary may have holes
        for token, id in vocabulary.items():
            tokens[id] = token
        for id, added in self._tokenizer.added_tokens_decoder.items():
            tokens[id] = added.content
        return tokens

    @cached_property
    def byte_level(self) -> bool:
        """True if `tokens` are written in GPT-2's byte alphabet."""
        return isinstance(self._wrapper.detokenizer, BPEStreamingDetokenizer)

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an answer."""
        return frozenset(self._wrapper.eos_token_ids)

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """Tokens that are read in a text before it is split into words, without those of nothing but space."""
        return {text: id for text, id in self._tokenizer.added_tokens_encoder.items() if text.strip(_BLANK)}

    @cached_property
    def encode_literally(self) -> Callable[[str], list[int]] | None:
        """Encodes a text with none of `added_tokens`, and without Unicode's normal forms; None if it cannot."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)  # a tokenizer in Python has none
        if backend is None or not _spells_bytes(backend):
            return None
        space = [text for text in self._tokenizer.added_tokens_encoder if not text.strip(_BLANK)]
        return partial(_literal_tokens, _literal(backend, space), frozenset(self.added_tokens.values()))

    @cached_property
    def template(self) -> str:
        """The chat template's source; empty if there is none, or one in Python. Of several by name, the sources of
        those that render chats and tools."""
        source = self._tokenizer.chat_template
        if isinstance(source, dict):
            return "\0".join(source[name] for name in ("default", "tool_use") if name in source)
        return source or ""

    @property
    def think(self) -> tuple[str, str] | None:
        """Markers around reasoning, or None."""
        return (self._wrapper.think_start, self._wrapper.think_end) if self._wrapper.has_thinking else None

    @property
    def tool(self) -> tuple[str, str] | None:
        """Markers around a tool call, or None."""
        wrapper = self._wrapper
        return (wrapper.tool_call_start, wrapper.tool_call_end) if wrapper.has_tool_calling else None

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """The tokens that structure a chat."""
        markers = (*(self.think or ()), *(self.tool or ()), self._marker)
        return ControlTokens(self._tokenizer, self._template_source, markers, self.encode)

    @property
    def _template_source(self) -> str:
        if self._wrapper._chat_template is not None:
            return ""
        source = self._tokenizer.chat_template  # a dict holds several by name, and any may be used
        return "\0".join(source.values()) if isinstance(source, dict) else source or ""

    def encode(self, text: str) -> list[int]:
        """Tokenize a text; markers in it become control tokens, and none are added. Releases the interpreter's lock if
        the tokenizer is not in Python. Raises `JobFailure` if the tokenizer panics."""
        if self._backend is None:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        # `encode` would hold the interpreter's lock throughout: 2.5 s for a megabyte of digits.
        (encoding,) = _without_panic(self._backend.encode_batch_fast, [text], add_special_tokens=False)
        return list(encoding.ids)

    def streaming(self) -> "Streaming":
        """Return a new detokenizer for one answer."""
        return Streaming(self._wrapper.detokenizer)

    def render(
        self, conversation: list[dict[str, Any]], *, tools: list[dict[str, Any]], continues: bool,
        variables: dict[str, Any], images: Mapping[str, str] | None = None,
    ) -> str:  # fmt: skip
        """Return the chat template's text of a conversation. Raises what the template raises, and ValueError if it does
        not emit each image once."""
        if not images:
            return self._render(conversation, tools, continues, variables)
        text = self._render(split_parts(conversation, images), tools, continues, variables)
        return expand_markers(text, self._marker, conversation, images)

    def _render(
        self,
        conversation: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        continues: bool,
        variables: dict[str, Any],
    ) -> str:
        how = {"tokenize": False, "add_generation_prompt": not continues, "continue_final_message": continues}
        if self._wrapper._chat_template is not None:  # a template in Python, written for the wrapper's defaults
            offered = {"tools": tools} if tools else {}
            return str(self._wrapper.apply_chat_template(conversation, **how, **offered, **variables))
        named = {self._thinking.get(name, name): value for name, value in variables.items()}
        given: dict[str, Any] = {**self._defaults(tools), **named}
        source = self._tokenizer.chat_template
        if isinstance(source, dict) and "rag" in source and named.get("documents") and not tools:
            # transformers takes `tool_use` if there are tools, else `default`, and this one only if asked for it.
            given["chat_template"] = "rag"
        # Not through the wrapper, which enables thinking by default.
        return str(self._tokenizer.apply_chat_template(conversation, tools=tools or None, **how, **given))

    def _defaults(self, tools: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what the template reads besides `tools`, as the cards of SmolLM 3 and FireFunction 2 give it. The day
        alone, since a time would change each prompt from its beginning on."""
        functions = [tool["function"] for tool in tools]
        as_json = json.dumps(functions, indent=4, ensure_ascii=False) if functions else ""
        known: dict[str, Any] = {"xml_tools": functions or None}
        if "tools" not in self._read_by_name:
            known |= {"functions": as_json, "datetime": date.today().isoformat()}
        return {name: value for name, value in known.items() if name in self._read_by_name}

    @cached_property
    def _read_by_name(self) -> frozenset[str]:
        """Names of the variables that the template reads. Raises what the template's compilation raises."""
        sources = filter(None, self.template.split("\0"))
        return frozenset[str]().union(*map(variables_of, sources))

    @cached_property
    def _thinking(self) -> dict[str, str]:
        """Map of `enable_thinking` to the template's own name for it."""
        return {"enable_thinking": self._wrapper._thinking_kwarg}


def _backend(tokenizer: Any) -> Any:
    """Return the tokenizer of Hugging Face's `tokenizers` with the settings that transformers uses, or None if Python
    code takes part in encoding. Calling it directly avoids transformers' conversion of its results, which holds the
    interpreter's lock."""
    if getattr(type(tokenizer), "_encode_plus", None) is not TokenizersBackend._encode_plus:
        return None
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


def _spells_bytes(backend: Tokenizer) -> bool:
    """Return True if each token stands for bytes, in GPT-2's alphabet or as SentencePiece writes them."""
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    kinds = {decoder.get("type"), *(inner["type"] for inner in decoder.get("decoders", ()))}
    return decoder.get("type") == "ByteLevel" or "ByteFallback" in kinds


def _literal(backend: Tokenizer, space: Iterable[str]) -> Tokenizer:
    """Return a tokenizer that shares the model and has no added tokens but these of space."""
    literal = Tokenizer(backend.model)
    if normalizer := _literal_normalizer(backend.normalizer):
        literal.normalizer = normalizer
    if backend.pre_tokenizer:
        literal.pre_tokenizer = backend.pre_tokenizer
    # The others would get new ids here, and are spelled by several tokens instead.
    literal.add_tokens([text for text in space if backend.model.token_to_id(text) is not None])
    return literal


def _literal_normalizer(normalizer: Any) -> Any:
    """Return the normalizer without Unicode's normal forms. Its replacement of spaces stays, as in the vocabulary."""
    if isinstance(normalizer, normalizers.Sequence):
        parts = (_literal_normalizer(normalizer[place]) for place in range(len(normalizer)))
        return normalizers.Sequence([part for part in parts if part])
    return None if isinstance(normalizer, _NORMALIZERS) else normalizer


def _literal_tokens(literal: Tokenizer, added: frozenset[int], text: str) -> list[int]:
    ids: list[int] = literal.encode(text, add_special_tokens=False).ids
    if added.isdisjoint(ids):
        return ids
    # The model may have an added token as a word of its own too. No letter of it does.
    return [id for letter in text for id in literal.encode(letter, add_special_tokens=False).ids]


def _without_panic(call: Callable[..., T], *given: Any, **named: Any) -> T:
    """Call, and turn a panic in Rust into a `JobFailure`: it is no Exception and would end more than the job. One cause
    is a run of spaces that is too long for the tokenizer's regular expressions."""
    try:
        return call(*given, **named)
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise JobFailure("invalid_request", f"messages: the model's tokenizer failed on them: {error}.") from None


class Streaming:
    """mlx-lm's streaming detokenizer, for one answer."""

    def __init__(self, upstream: Any) -> None:
        self._upstream = upstream

    def feed(self, token: int) -> str:
        """Add a token, and return the text that is complete with it."""
        self._upstream.add_token(token)
        return str(self._upstream.last_segment)

    def flush(self) -> str:
        """Return the text held back. No token follows."""
        self._upstream.finalize()
        return str(self._upstream.last_segment)


Images = Mapping[str, str]  # from the character that marks an image to the text that the model reads for it


def split_parts(conversation: list[dict[str, Any]], images: Images) -> list[dict[str, Any]]:
    """Return the messages with contents that have images as lists of parts; other contents stay as they are."""
    return [{**message, "content": _parts(message["content"], images)} for message in conversation]


def expand_markers(text: str, marker: str, conversation: list[dict[str, Any]], images: Images) -> str:
    """Replace the markers in the template's text by the texts of the images, in order. Raises ValueError if the
    template did not emit each image exactly once."""
    pieces = [piece for message in conversation for piece in _pieces(message["content"], images)]
    wanted = [images[piece] for piece in pieces if piece in images]
    # A marker in a client's text is allowed if it is marked as text.
    first, *others = re.split(f"(?<!{CONTROL_TOKEN_START}){re.escape(marker)}", text)
    if len(others) != len(wanted):
        raise ValueError(
            f"it has {len(others)} images instead of {len(wanted)}; no text may contain {marker}, the model's own "
            "marker for an image"
        )
    return first + "".join(image + other for image, other in zip(wanted, others, strict=True))


def _parts(content: Any, images: Images) -> Any:
    pieces = _pieces(content, images)
    if not any(piece in images for piece in pieces):
        return content
    return [{"type": "image"} if piece in images else {"type": "text", "text": piece} for piece in pieces if piece]


def _pieces(content: Any, images: Images) -> list[str]:
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return re.split(f"([{re.escape(''.join(images))}])", text)
