"""Every name and signature of mlx-embeddings that we borrow. When an upgrade fails, it fails here first."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.embedding import FAMILIES
from worker.engine.upstream import mlx_embeddings


@pytest.mark.parametrize(
    ("call", "parameters"),
    [
        (mlx_embeddings.load_model, ["model_path", "lazy", "model_config", "get_model_classes", "kwargs"]),
        (mlx_embeddings.load_tokenizer, ["model_path", "tokenizer_config_extra"]),
    ],
)
def test_a_borrowed_function_takes_what_it_took(call: Callable[..., Any], parameters: list[str]) -> None:
    assert list(inspect.signature(call).parameters) == parameters


@pytest.mark.parametrize("family", FAMILIES)
def test_a_network_takes_tokens_alone(family: str) -> None:
    module = importlib.import_module(f"mlx_embeddings.models.{family.replace('-', '_')}")
    _, first, *others = inspect.signature(module.Model.__call__).parameters.values()
    assert first.name in ("input_ids", "inputs")
    assert all(other.default is not inspect.Parameter.empty for other in others)
