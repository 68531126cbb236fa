"""A conversation with images becomes the same tokens as with the model's own processor."""

from functools import cache
from typing import Any

import numpy as np
import pytest
from PIL import Image

from models.tiny_vision import CONFIGS, FILES
from schemas import ChatRequest
from tests.engine.vision import cases
from worker.engine.tokenizer import MLXTokenizer
from worker.engine.upstream.mlx_vlm import load_processor
from worker.errors import JobFailure
from worker.text.codec import TextCodec

FAMILIES = [*CONFIGS]
PLACEHOLDER_TOKENS = [cases.image(1, 24, 16), cases.image(2, 40, 32), cases.image(3, 16, 16)]
# The strips are too slim for some.
SIZES = [
    (1, 1),
    (3, 1),
    (1, 3),
    (5, 7),
    (3, 190),
    (1, 2000),
    (2000, 1),
    (2000, 31),
    (33, 17),
    (1023, 767),
    (1600, 1200),
]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def prompt_image() -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


CONVERSATION = [
    {"role": "system", "content": "Say what you see."},
    {"role": "user", "content": [text("What is this?"), prompt_image()]},
    {"role": "assistant", "content": "Squares."},
    {
        "role": "user",
        "content": [prompt_image(), text("And here, beside\nthat: "), prompt_image(), text(" one \U00100000?")],
    },
]


def language(family: str, **more: bool) -> TextCodec:
    model = cases.model(family)
    return TextCodec(MLXTokenizer(model.tokenizer, cases.image_processor(family).marker), model.vocab, **more)


async def tokens(family: str, messages: list[dict[str, Any]], images: list[Image.Image]) -> tuple[int, ...]:
    texts = [cases.image_processor(family).preprocess(image, b"").text for image in images]
    request = ChatRequest.model_validate({"messages": messages})
    return (await language(family).prompt(request, texts)).tokens


@cache
def opened(family: str) -> Any:
    """Return mlx-vlm's own processor. Qwen's makes one frame of an image, as the worker does, instead of two."""
    processor = load_processor(cases.folder(family), add_detokenizer=False)
    if hasattr(processor.image_processor, "temporal_patch_size"):
        processor.image_processor.temporal_patch_size = 1
    return processor


def by_processor(family: str, images: list[Image.Image]) -> list[int]:
    processor = opened(family)
    generated = [
        {**m, "content": [{"type": "image"} if p["type"] == "image_url" else p for p in m["content"]]}
        if isinstance(m["content"], list)
        else m
        for m in CONVERSATION
    ]
    template = cases.model(family).vision.template  # type: ignore[union-attr]
    text = processor.tokenizer.apply_chat_template(
        generated, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = processor(text=[text], images=images)["input_ids"].tolist()[0]
    return ids


@pytest.mark.parametrize("family", FAMILIES)
async def test_images_of_several_turns_have_the_spans_of_the_processor(family: str) -> None:
    prompt = await tokens(family, CONVERSATION, PLACEHOLDER_TOKENS)
    assert list(prompt) == by_processor(family, PLACEHOLDER_TOKENS)
    images = [
        cases.image_processor(family).preprocess(image, bytes([at])) for at, image in enumerate(PLACEHOLDER_TOKENS)
    ]
    prompt_images = cases.image_processor(family).prompt_images(prompt, images)
    assert [prompt_image.digest for prompt_image in prompt_images] == [processed.digest for processed in images]
    placeholder = prompt[prompt_images[0].span[0]]
    within = [prompt[start:end] for start, end in (prompt_image.span for prompt_image in prompt_images)]
    assert all(each[0] == each[-1] == placeholder for each in within)
    assert sum(each.count(placeholder) for each in within) == prompt.count(placeholder)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_text_of_an_image_equals_the_processors(family: str, width: int, height: int) -> None:
    image_processor, vision = cases.image_processor(family), cases.model(family).vision
    image, written = cases.image(1, width, height), FILES[family]["image"]
    try:
        expected = opened(family)(text=[written], images=[image])
    except ValueError as refused:
        with pytest.raises(ValueError, match=str(refused)):
            image_processor.preprocess(image, b"")
        return
    processed = image_processor.preprocess(image, b"")
    assert (
        cases.encoder(family)(written.replace(image_processor.marker, processed.text))
        == expected["input_ids"].tolist()[0]
    )
    assert np.array_equal(processed.pixel_inputs["pixel_values"], expected["pixel_values"])
    assert vision is not None
    assert len(vision.family.encode(processed.pixel_inputs, []).rows) == processed.tokens


def test_frames_are_repeated_only_on_the_device() -> None:
    """This halves the memory of a photo while its job runs."""
    family, image = "qwen3_5", cases.image(1, 48, 32)
    patches = cases.image_processor(family).preprocess(image, b"").pixel_inputs["pixel_values"]
    processor = load_processor(cases.folder(family), add_detokenizer=False)
    films = processor.image_processor(images=[image])["pixel_values"]
    assert patches.nbytes * 2 == films.nbytes
    vision = cases.model(family).vision
    assert vision is not None
    assert np.array_equal(np.array(vision.family._repeat_frames(patches)), films)  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", FAMILIES)
async def test_placeholder_quoted_in_a_text_is_no_image(family: str) -> None:
    model, marker = cases.model(family), cases.image_processor(family).marker
    messages = [{"role": "user", "content": [text(f"{marker} one"), prompt_image(), text(f"two {marker}{marker}")]}]
    harmless = [{"role": "user", "content": [text("x one"), prompt_image(), text("two xx")]}]
    assert model.vision is not None
    placeholder = model.vision.family.placeholder
    for shown in (PLACEHOLDER_TOKENS[:1], []):
        generated = [
            [{**m, "content": m["content"][:: 1 if shown else 2]} for m in each] for each in (messages, harmless)
        ]
        quoted, plain = [await tokens(family, each, shown) for each in generated]
        assert quoted.count(placeholder) == plain.count(placeholder)


@pytest.mark.parametrize("family", FAMILIES)
async def test_placeholder_in_a_text_with_images_is_refused_if_control_tokens_are_allowed(family: str) -> None:
    marker, processed = (
        cases.image_processor(family).marker,
        cases.image_processor(family).preprocess(PLACEHOLDER_TOKENS[0], b""),
    )
    image_request = {"messages": [{"role": "user", "content": [prompt_image(), text(f"one {marker} more")]}]}
    with pytest.raises(JobFailure) as raised:
        await language(family, control_tokens=True).prompt(ChatRequest.model_validate(image_request), [processed.text])
    assert raised.value.type == "invalid_request"
    assert marker in raised.value.message


async def test_boundaries_are_planned_around_images() -> None:
    family = "qwen3_5"
    texts = [cases.image_processor(family).preprocess(image, b"").text for image in PLACEHOLDER_TOKENS]
    request = ChatRequest.model_validate({"messages": CONVERSATION})
    prompt = await language(family, boundaries=True).prompt(request, texts)
    longer = [*CONVERSATION, {"role": "assistant", "content": "Nothing."}, {"role": "user", "content": "Look again."}]
    after = await language(family).prompt(ChatRequest.model_validate({"messages": longer}), texts)
    shared = next(at for at in range(len(prompt.tokens) + 1) if prompt.tokens[: at + 1] != after.tokens[: at + 1])
    assert max(prompt.boundaries) in (shared, shared - 1)


@pytest.mark.parametrize("family", FAMILIES)
async def test_text_between_images_is_droppable_and_images_are_not(family: str) -> None:
    river, garden, question = (" ".join(f"The {it} has {i} lamps." for i in range(50)) for it in ("river", "lawn", "?"))
    messages = [
        {"role": "user", "content": [text("Here: "), prompt_image(), text(river), prompt_image(), text(garden)]},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": [text("Short."), prompt_image(), text(question)]},
    ]
    images = [
        cases.image_processor(family).preprocess(image, bytes([at])) for at, image in enumerate(PLACEHOLDER_TOKENS)
    ]
    request = ChatRequest.model_validate({"messages": messages})
    prompt = await language(family, droppable=True).prompt(request, [processed.text for processed in images])
    tokenizer = cases.model(family).tokenizer
    active = [str(tokenizer.decode(list(prompt.tokens[start:end]))) for start, end in prompt.droppable_ranges]
    for thinnable, whole in zip(active, [river, garden, question[400:-400]], strict=True):
        assert whole.endswith(thinnable.strip())
        assert len(thinnable) >= len(whole) - 1
    spans = [prompt_image.span for prompt_image in cases.image_processor(family).prompt_images(prompt.tokens, images)]
    assert not any(start < end and first < behind for start, behind in prompt.droppable_ranges for first, end in spans)
