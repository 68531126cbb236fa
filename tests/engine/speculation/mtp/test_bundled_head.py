"""The bundled model's MTP head drafts well enough to be worth its forwards."""

from dataclasses import replace
from random import Random

import mlx.core as mx
import pytest

from models.training.data import draw_chat
from tests.engine.driver import Run
from tests.engine.speculation.oracle import pause_nothing
from tests.engine.tiny import model_of
from tests.support.stack import TINY_CHAT
from worker.engine.cache.recurrent import Replay
from worker.engine.checkpoint import read_json
from worker.engine.model.drafter import with_head
from worker.engine.model.load import Model
from worker.engine.speculation import speculator
from worker.engine.speculation.mtp import HeadProposer
from worker.engine.speculation.speculator import Speculator
from worker.engine.upstream.mlx_lm import load_model

DEPTH = 3
CHATS = 24


@pytest.fixture(scope="module")
def tiny_chat() -> Model:
    network, _ = load_model(TINY_CHAT)
    network.set_dtype(mx.float32)
    return with_head(model_of(network, read_json(TINY_CHAT, "config.json")), str(TINY_CHAT), None)


def prompts(model: Model) -> list[tuple[int, ...]]:
    dice = Random(1)
    chats = [draw_chat(dice, fillers=6)[:-1] for _ in range(CHATS)]
    messages = [[{"role": each.role, "content": each.text} for each in chat] for chat in chats]
    return [tuple(model.tokenizer.apply_chat_template(each, add_generation_prompt=True)) for each in messages]


class Counting(HeadProposer):
    """A proposer that counts the tokens that were right."""

    accepted = 0

    def observe_accepted(self, row: object, proposed: int, accepted: int) -> None:
        self.accepted += accepted


def answers(model: Model, used: Speculator | None) -> list[list[int]]:
    run = Run(model, prefix_bytes=0, speculator=used, step_s=100.0)  # on a busy machine too, no gap limits drafts
    for index, tokens in enumerate(prompts(model)):
        run.add(str(index), tokens, max_tokens=120)
    run.drain()
    return [run.generated[str(index)] for index in range(CHATS)]


def test_a_forward_at_depth_three_makes_two_tokens_on_mixed_skills(
    tiny_chat: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculator, "choose_width", lambda offers, *_, **__: 1 + DEPTH * any(offers))
    pause_nothing(monkeypatch)
    assert tiny_chat.head is not None
    proposer = Counting(tiny_chat.head, DEPTH)
    used = Speculator(
        head=proposer,
        max_draft=DEPTH,
        recurrence=Replay(tiny_chat.network),
        eos_ids=tiny_chat.tokenizer.eos_token_ids,
    )
    drafted = answers(tiny_chat, used)
    assert drafted == answers(replace(tiny_chat, head=None), None)
    tokens = sum(map(len, drafted))
    forwards = tokens - proposer.accepted  # each makes one token, and those of its draft that are right
    assert tokens / forwards >= 2.0
