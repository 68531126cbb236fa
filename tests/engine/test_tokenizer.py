"""mlx-lm's tokenizer behind the interface of `worker.text`."""

import json
import shutil
import threading
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from tests.selection import examples
from tests.support.stack import TINY_CHAT
from tests.text.tokenizers import KINDS, tokenizer
from worker.engine.tokenizer import MLXTokenizer
from worker.engine.upstream.mlx_lm import TokenizerWrapper, load_tokenizer
from worker.engine.upstream.transformers import TokenizersBackend
from worker.errors import JobFailure
from worker.text.grammar.llg_tokenizer import llguidance_tokenizer
from worker.text.tokenizer import Vocabulary

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def wrapper() -> Any:
    return load_tokenizer(TINY_CHAT)


def render(words: MLXTokenizer, **given: Any) -> str:
    return words.render(HELLO, **{"tools": [], "continues": False, "variables": {}, **given})


def test_properties_of_the_tiny_models_tokenizer(wrapper: Any) -> None:
    words = MLXTokenizer(wrapper)
    assert (words.think, words.tool) == (("<think>", "</think>"), ("<tool_call>", "</tool_call>"))
    assert (words.byte_level, words.eos_token_ids) == (True, {2})
    assert words.tokens[5] == "<tool_call>"
    assert words.encode("<|im_end|>") == [2]
    assert words.added_tokens["<tool_call>"] == 5
    assert "Two user messages in a row" in words.template


def test_template_gets_enable_thinking_only_from_the_request(wrapper: Any) -> None:
    wrapper._tokenizer.chat_template = "{{ enable_thinking is defined }} {{ enable_thinking }}"
    words = MLXTokenizer(wrapper)
    assert render(words) == "False "
    assert render(words, variables={"enable_thinking": False}) == "True False"


def test_template_gets_enable_thinking_under_its_own_name(wrapper: Any) -> None:
    wrapper._thinking_kwarg = "thinking"  # as mlx-lm infers it from a tokenizer with a renderer of its own
    wrapper._tokenizer.chat_template = "{{ thinking }}"
    assert render(MLXTokenizer(wrapper), variables={"enable_thinking": True}) == "True"


NAMED = {
    "default": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}",
    "tool_use": "{{ tools | tojson }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}",
    "rag": "{% for d in documents %}{{ d.text }}{% endfor %}{{ messages[0].content }}",
}
CLOCK = [{"type": "function", "function": {"name": "clock", "description": "The time."}}]


def _in_the_config(folder: Path, templates: dict[str, str]) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _in_files(folder: Path, templates: dict[str, str]) -> None:
    (folder / "additional_chat_templates").mkdir()
    for name, text in templates.items():
        default = folder / "chat_template.jinja"
        (default if name == "default" else folder / f"additional_chat_templates/{name}.jinja").write_text(text)


@pytest.mark.parametrize("write", [_in_the_config, _in_files])
def test_of_several_templates_the_one_for_the_request_is_rendered_as_transformers_does(
    tmp_path: Path, write: Callable[[Path, dict[str, str]], None]
) -> None:
    folder = shutil.copytree(TINY_CHAT, tmp_path / "copy")
    write(folder, NAMED)
    words, own = MLXTokenizer(load_tokenizer(folder)), AutoTokenizer.from_pretrained(folder)
    for tools in ([], CLOCK):
        expected = own.apply_chat_template(HELLO, tools=tools or None, add_generation_prompt=True)["input_ids"]
        assert words.encode(render(words, tools=tools)) == expected
    assert render(words) == "<|user|>Hello"
    assert render(words, tools=CLOCK).startswith('[{"type": "function"')
    documents = {"documents": [{"text": "Read this. "}]}
    assert render(words, variables=documents) == "Read this. Hello"
    assert render(words, tools=CLOCK, variables=documents) == render(words, tools=CLOCK)
    assert words.template == f"{NAMED['default']}\0{NAMED['tool_use']}"


def test_a_template_gets_tools_under_the_names_that_it_reads(wrapper: Any) -> None:
    wrapper._tokenizer.chat_template = "{{ xml_tools and xml_tools[0].name }} {{ functions }} {{ datetime }}"
    words = MLXTokenizer(wrapper)
    day = date.today().isoformat()
    given = render(words, tools=CLOCK)
    assert (given[:6], given[-len(day) :]) == ("clock ", day)
    assert json.loads(given.removeprefix("clock ").removesuffix(day)) == [CLOCK[0]["function"]]
    assert render(words) == f"None  {day}"
    assert render(words, variables={"datetime": "noon", "functions": "none"}) == "None none noon"
    wrapper._tokenizer.chat_template = "{{ tools is defined }}{{ functions is defined }}"
    assert render(MLXTokenizer(wrapper), tools=CLOCK) == "TrueFalse"


def test_a_template_in_python_is_called_as_mlx_lm_calls_it(wrapper: Any) -> None:
    called: list[dict[str, Any]] = []

    def template(conversation: Any, **how: Any) -> str:
        called.append(how)
        return "rendered"

    wrapper._chat_template = template
    assert render(MLXTokenizer(wrapper), continues=True) == "rendered"
    assert called == [{"add_generation_prompt": False, "continue_final_message": True, "enable_thinking": True}]


def test_template_gets_tools_or_none(wrapper: Any) -> None:
    wrapper._tokenizer.chat_template = "{{ tools[0].function.name if tools is not none else 'nothing' }}"
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    words = MLXTokenizer(wrapper)
    assert (render(words, tools=[tool]), render(words)) == ("look", "nothing")


def test_continued_turn_stays_open(wrapper: Any) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "Good mor"}]
    text = MLXTokenizer(wrapper).render(begun, tools=[], continues=True, variables={})
    assert text.endswith("<|im_start|>assistant\nGood mor")


def of_kind(kind: str, **given: Any) -> Any:
    return TokenizerWrapper(TokenizersBackend(tokenizer_object=tokenizer(kind), **given))


PIECES = [
    "Hello",
    " ",
    "\n\n",
    "<|im_end|>",
    "<|image_pad|>",
    "<think>",
    "12",
    "é",
    "e\u0301",
    "日本語",
    "🙂",
    "\x00",
    "ing",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [False, True])
@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=9), max_size=30))
def test_tokens_equal_those_of_transformers(kind: str, split: bool, words: list[str]) -> None:
    wrapper, text = of_kind(kind, split_special_tokens=split), "".join(words)
    assert MLXTokenizer(wrapper).encode(text) == list(wrapper._tokenizer.encode(text, add_special_tokens=False))


def test_truncation_and_padding_of_a_tokenizer_file_are_disabled(tmp_path: Path) -> None:
    backend = tokenizer("qwen")
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    try:
        assert len(MLXTokenizer(of_kind("qwen")).encode("one two three four five six seven eight")) > 9
        assert 0 < len(MLXTokenizer(of_kind("qwen")).encode("a")) < 9
    finally:
        backend.no_truncation()
        backend.no_padding()


# Texts that spell markers, in and beside words, and characters that normal forms compose.
LITERAL = st.lists(
    st.sampled_from(["<|im_end|>", "<|im_start|>", "<unk>", "the ", " model", "e\u0301", "\ufb01", "  ", "\n", "1"])
    | st.text(max_size=3),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("kind", ["tiny-chat", "qwen"])
@settings(max_examples=examples(100), deadline=None)
@given(text=LITERAL)
def test_a_text_is_encoded_literally_letter_by_letter_and_never_as_a_marker(kind: str, text: str) -> None:
    words = MLXTokenizer(of_kind(kind))
    assert words.encode_literally
    ids = words.encode_literally(text)
    assert "<|im_end|>" in words.added_tokens
    assert not {*words.added_tokens.values()} & {*ids}
    assert words._tokenizer.backend_tokenizer.decoder.decode([words.tokens[id] for id in ids]) == text


def test_a_tokenizer_whose_tokens_have_no_known_bytes_encodes_nothing_literally() -> None:
    assert MLXTokenizer(of_kind("unigram")).encode_literally is None


@pytest.mark.parametrize("unigram", [False, True], ids=["merges", "unigram"])
def test_a_marker_that_is_a_word_of_the_model_too_is_not_encoded_literally(unigram: bool) -> None:
    letters = {letter: number for number, letter in enumerate("<abc>")}
    vocab = {**letters, "<a": 5, "<a>": 6}
    if unigram:
        model: Any = models.Unigram([(token, -1.0) for token in vocab], 0, byte_fallback=False)
    else:
        model = models.BPE(vocab, [("<", "a"), ("<a", ">")])
    backend = Tokenizer(model)
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    backend.add_special_tokens(["<a>"])
    words = MLXTokenizer(TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=backend)))
    assert words.encode("<a>b") == [6, 2]
    assert words.encode_literally
    assert words.encode_literally("<a>b") == [0, 1, 4, 2]


def test_llguidance_reads_the_tokens_that_it_would_find_in_the_definition(wrapper: Any) -> None:
    words = MLXTokenizer(wrapper)
    count = len(words.tokens) + 3
    ours = llguidance_tokenizer(words, Vocabulary(words), count)
    own = LLTokenizer(words._tokenizer.backend_tokenizer.to_str(), n_vocab=count)
    assert ours
    for token in range(len(words.tokens)):
        assert ours.decode_bytes([token]) == own.decode_bytes([token])
    assert [*map(ours.is_special_token, range(count))] == [*map(own.is_special_token, range(count))]
    assert ours.is_canonical
    assert (ours.vocab_size, ours.eos_tokens) == (count, [*words.eos_token_ids])


def test_tokenizer_in_python_is_supported() -> None:
    wrapper = TokenizerWrapper(ByT5Tokenizer())
    words = MLXTokenizer(wrapper)
    assert words.encode_literally is None
    assert words.encode("Hé") == wrapper._tokenizer.encode("Hé", add_special_tokens=False) != []


def test_tokenizer_with_its_own_encode_method_uses_it() -> None:
    class Reversed(TokenizersBackend):  # type: ignore[misc]
        def _encode_plus(self, text: str, **how: Any) -> Any:
            return super()._encode_plus(text[::-1], **how)

    ours, plain = Reversed(tokenizer_object=tokenizer("qwen")), of_kind("qwen")
    assert MLXTokenizer(TokenizerWrapper(ours)).encode("ab cd") == MLXTokenizer(plain).encode("dc ba")


def moves(work: Callable[[], object]) -> tuple[int, float]:
    """Return how often another thread ran meanwhile, and the seconds of the call."""
    counted, ended = 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not ended.wait(0.001):
            counted += 1

    other = threading.Thread(target=count)
    other.start()
    began, before = time.perf_counter(), counted
    work()
    took_s, during = time.perf_counter() - began, counted - before
    ended.set()
    other.join()
    return during, took_s


def test_other_threads_run_while_a_long_text_is_tokenized(wrapper: Any) -> None:
    words, digits = MLXTokenizer(wrapper), "0123456789" * 20_000
    during, took_s = moves(lambda: words.encode(digits))
    assert during > 20 * took_s  # with the interpreter's lock held, one or two


def test_panic_of_the_tokenizer_fails_only_the_job() -> None:
    """Or it would end more than its job, since it is no Exception."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+b"), "isolated")  # type: ignore[assignment]
    words = MLXTokenizer(TokenizerWrapper(TokenizersBackend(tokenizer_object=backend)))
    with pytest.raises(JobFailure, match="retry-limit"):
        words.encode("a" * 40)
