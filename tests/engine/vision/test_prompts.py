"""A conversation with images becomes the tokens that the model's own processor makes of it."""

from typing import Any

import numpy as np
import pytest
from PIL import Image

from schemas import ChatRequest
from tests.engine.vision import seen
from tests.engine.vision.checkpoints import CONFIGS, FILES
from worker.engine.tokenizer import MLXTokenizer
from worker.engine.upstream.mlx_vlm import load_processor
from worker.errors import JobFailure
from worker.text.codec import TextCodec

FAMILIES = [*CONFIGS]
SHOWN = [seen.image(1, 24, 16), seen.image(2, 40, 32), seen.image(3, 16, 16)]
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


def picture() -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


CONVERSATION = [
    {"role": "system", "content": "Say what you see."},
    {"role": "user", "content": [text("What is this?"), picture()]},
    {"role": "assistant", "content": "Squares."},
    {"role": "user", "content": [picture(), text("And here, beside\nthat: "), picture(), text(" one \U00100000?")]},
]


def language(family: str, **more: bool) -> TextCodec:
    model = seen.model(family)
    return TextCodec(MLXTokenizer(model.tokenizer, seen.eyes(family).marker), model.vocab, **more)


async def tokens(family: str, messages: list[dict[str, Any]], images: list[Image.Image]) -> tuple[int, ...]:
    texts = [seen.eyes(family).preprocess(image, b"").text for image in images]
    request = ChatRequest.model_validate({"messages": messages})
    return (await language(family).prompt(request, texts)).tokens


def by_processor(family: str, images: list[Image.Image]) -> list[int]:
    processor = seen.eyes(family)._processor
    said = [
        {**m, "content": [{"type": "image"} if p["type"] == "image_url" else p for p in m["content"]]}
        if isinstance(m["content"], list)
        else m
        for m in CONVERSATION
    ]
    template = seen.model(family).vision.template  # type: ignore[union-attr]
    text = processor.tokenizer.apply_chat_template(
        said, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = processor(text=[text], images=images)["input_ids"].tolist()[0]
    return ids


@pytest.mark.parametrize("family", FAMILIES)
async def test_images_of_several_turns_are_where_the_processor_puts_them(family: str) -> None:
    prompt = await tokens(family, CONVERSATION, SHOWN)
    assert list(prompt) == by_processor(family, SHOWN)
    sights = [seen.eyes(family).preprocess(image, bytes([at])) for at, image in enumerate(SHOWN)]
    pictures = seen.eyes(family).prompt_images(prompt, sights)
    assert [picture.digest for picture in pictures] == [sight.digest for sight in sights]
    placeholder = prompt[pictures[0].span[0]]
    within = [prompt[start:end] for start, end in (picture.span for picture in pictures)]
    assert all(each[0] == each[-1] == placeholder for each in within)
    assert sum(each.count(placeholder) for each in within) == prompt.count(placeholder)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_an_image_of_any_size_is_what_the_processor_writes_for_it(family: str, width: int, height: int) -> None:
    eyes, vision = seen.eyes(family), seen.model(family).vision
    image, written = seen.image(1, width, height), FILES[family]["image"]
    try:
        processed = eyes._processor(text=[written], images=[image])
    except ValueError as refused:
        with pytest.raises(ValueError, match=str(refused)):
            eyes.preprocess(image, b"")
        return
    sight = eyes.preprocess(image, b"")
    assert seen.encoder(family)(written.replace(eyes.marker, sight.text)) == processed["input_ids"].tolist()[0]
    assert np.array_equal(sight.pixel_inputs["pixel_values"], processed["pixel_values"])
    assert vision is not None
    assert len(vision.family.encode(sight.pixel_inputs, []).rows) == sight.tokens


def test_a_still_is_no_film_until_the_tower_gets_it() -> None:
    """Half of what a photo takes in memory while its job runs."""
    family, image = "qwen3_5", seen.image(1, 48, 32)
    patches = seen.eyes(family).preprocess(image, b"").pixel_inputs["pixel_values"]
    processor = load_processor(seen.folder(family), add_detokenizer=False)
    films = processor.image_processor(images=[image])["pixel_values"]
    assert patches.nbytes * 2 == films.nbytes
    vision = seen.model(family).vision
    assert vision is not None
    assert np.array_equal(np.array(vision.family._film(patches)), films)  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_text_with_the_model_s_sign_for_an_image_shows_none(family: str) -> None:
    model, marker = seen.model(family), seen.eyes(family).marker
    messages = [{"role": "user", "content": [text(f"{marker} one"), picture(), text(f"two {marker}{marker}")]}]
    harmless = [{"role": "user", "content": [text("x one"), picture(), text("two xx")]}]
    assert model.vision is not None
    placeholder = model.vision.family.placeholder
    for shown in (SHOWN[:1], []):
        said = [[{**m, "content": m["content"][:: 1 if shown else 2]} for m in each] for each in (messages, harmless)]
        quoted, plain = [await tokens(family, each, shown) for each in said]
        assert quoted.count(placeholder) == plain.count(placeholder)


@pytest.mark.parametrize("family", FAMILIES)
async def test_where_control_tokens_are_allowed_such_a_text_beside_images_is_refused(family: str) -> None:
    marker, sight = seen.eyes(family).marker, seen.eyes(family).preprocess(SHOWN[0], b"")
    asked = {"messages": [{"role": "user", "content": [picture(), text(f"one {marker} more")]}]}
    with pytest.raises(JobFailure) as raised:
        await language(family, control_tokens=True).prompt(ChatRequest.model_validate(asked), [sight.text])
    assert raised.value.type == "invalid_request"
    assert marker in raised.value.message


async def test_places_where_later_prompts_part_are_planned_around_images() -> None:
    family = "qwen3_5"
    texts = [seen.eyes(family).preprocess(image, b"").text for image in SHOWN]
    request = ChatRequest.model_validate({"messages": CONVERSATION})
    prompt = await language(family, boundaries=True).prompt(request, texts)
    longer = [*CONVERSATION, {"role": "assistant", "content": "Nothing."}, {"role": "user", "content": "Look again."}]
    after = await language(family).prompt(ChatRequest.model_validate({"messages": longer}), texts)
    shared = next(at for at in range(len(prompt.tokens) + 1) if prompt.tokens[: at + 1] != after.tokens[: at + 1])
    assert max(prompt.boundaries) in (shared, shared - 1)


@pytest.mark.parametrize("family", FAMILIES)
async def test_long_texts_between_images_may_be_thinned_and_images_may_not(family: str) -> None:
    river, garden, question = (" ".join(f"The {it} has {i} lamps." for i in range(50)) for it in ("river", "lawn", "?"))
    messages = [
        {"role": "user", "content": [text("Here: "), picture(), text(river), picture(), text(garden)]},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": [text("Short."), picture(), text(question)]},
    ]
    sights = [seen.eyes(family).preprocess(image, bytes([at])) for at, image in enumerate(SHOWN)]
    request = ChatRequest.model_validate({"messages": messages})
    prompt = await language(family, thinnable=True).prompt(request, [sight.text for sight in sights])
    tokenizer = seen.model(family).tokenizer
    inside = [str(tokenizer.decode(list(prompt.tokens[start:end]))) for start, end in prompt.droppable_ranges]
    for thinnable, whole in zip(inside, [river, garden, question[400:-400]], strict=True):
        assert whole.endswith(thinnable.strip())
        assert len(thinnable) >= len(whole) - 1
    spans = [picture.span for picture in seen.eyes(family).prompt_images(prompt.tokens, sights)]
    assert not any(start < end and first < behind for start, behind in prompt.droppable_ranges for first, end in spans)
