"""Every name, signature and behaviour of transformers that we borrow. When an upgrade fails, it fails here first."""

import inspect
from importlib.metadata import version
from typing import Any

import pytest

from tests.support.stack import TINY_CHAT
from worker.engine.control_tokens import _pattern
from worker.engine.upstream import transformers as upstream
from worker.engine.upstream.mlx_lm import load_tokenizer

START, END = upstream.CONTROL_TOKEN_START, upstream.CONTROL_TOKEN_END


@pytest.fixture
def tokenizer() -> Any:
    return load_tokenizer(TINY_CHAT)._tokenizer


def test_the_version_is_the_one_that_these_tests_were_written_against() -> None:
    assert version("transformers") == "5.23.0"


def test_the_functions_take_what_we_give_them(tokenizer: Any) -> None:
    assert list(inspect.signature(upstream.mark_control_tokens).parameters) == ["obj", "control_tokens_re"]
    assert list(inspect.signature(upstream.encode_marked_chat).parameters) == ["tokenizer", "chat"]
    assert list(inspect.signature(tokenizer._get_control_tokens).parameters) == ["chat_template"]
    assert list(inspect.signature(tokenizer._encode_without_added_tokens).parameters) == ["text"]


def test_the_variables_of_a_template_are_those_that_it_reads() -> None:
    template = "{% set a = 1 %}{% generation %}{{ a + b }}{% endgeneration %}{% for c in d %}{{ c }}{% endfor %}"
    assert upstream.variables_of(template) == {"b", "d"}


def test_a_control_token_is_marked_and_marks_that_were_there_are_dropped() -> None:
    marked = upstream.mark_control_tokens(f"a{START}<x>b{END}", _pattern(["<x>"]))
    assert marked == f"a{START}<x>{END}b"


def test_keys_are_not_marked_upstream() -> None:
    """Which is why we walk through objects ourselves."""
    assert upstream.mark_control_tokens({"<x>": 1}, _pattern(["<x>"])) == {"<x>": 1}


def test_only_marked_tokens_are_encoded_as_text(tokenizer: Any) -> None:
    ids = upstream.encode_marked_chat(tokenizer, f"<|im_start|>a{START}<|im_end|>{END}b<|im_end|>")
    assert tokenizer.decode(ids) == "<|im_start|>a<|im_end|>b<|im_end|>"
    assert [id for id in ids if id in (1, 2)] == [1, 2]


def test_encode_marked_chat_uses_only_the_interface_that_ours_has(tokenizer: Any) -> None:
    class Recorder:
        def __getattr__(self, name: str) -> Any:
            used.add(name)
            return getattr(tokenizer, name)

    used = set[str]()
    upstream.encode_marked_chat(Recorder(), f"a{START}<|im_end|>{END}b")
    assert used == {"added_tokens_encoder", "encode", "convert_tokens_to_ids", "_encode_without_added_tokens"}


def test_a_control_token_that_stays_one_is_an_error(tokenizer: Any) -> None:
    tokenizer._encode_without_added_tokens = lambda text: [2]
    with pytest.raises(ValueError, match="Can't sanitize"):
        upstream.encode_marked_chat(tokenizer, f"{START}<|im_end|>{END}")


def test_control_tokens_are_the_special_ones_and_those_that_the_template_writes(tokenizer: Any) -> None:
    tokenizer.add_tokens(["<table>", "<note>", "\n\n"])
    assert "<|im_end|>" in tokenizer._get_control_tokens("{{ '<note>' }}\n\n")
    assert {"<table>", "<note>", "\n\n"} & set(tokenizer._get_control_tokens("{{ '<note>' }}\n\n")) == {"<note>"}


def test_a_tokenizer_encodes_with_the_method_that_we_go_around(tokenizer: Any) -> None:
    assert type(tokenizer)._encode_plus is upstream.TokenizersBackend._encode_plus
    assert tokenizer.split_special_tokens is False
    (encoding,) = tokenizer.backend_tokenizer.encode_batch_fast(["Hi<|im_end|>"], add_special_tokens=False)
    assert encoding.ids == tokenizer.encode("Hi<|im_end|>", add_special_tokens=False)
