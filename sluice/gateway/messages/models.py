"""The models in Anthropic's form."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

HEADER = "anthropic-version"  # requests with this header get Anthropic's form


def model_info(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model in Anthropic's form. `model` is in OpenAI's."""
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": datetime.fromtimestamp(model["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": model["max_model_len"],
        "max_tokens": model["max_model_len"],
    }


def model_page(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the list of all models, which is one page."""
    page = [model_info(model) for model in models]
    ids = [info["id"] for info in page] or [None]
    return {"data": page, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}
