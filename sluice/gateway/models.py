"""The names of models: those of requests, and those that workers serve."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from sluice.contract.keys import MODEL_NAME
from sluice.errors import describe_served
from sluice.gateway.caller import Caller
from sluice.gateway.errors import ApiError
from sluice.http_errors import ErrorForm
from sluice.presence import mapped_name

DEFAULT = "default"  # for a request without a model


def requested_model(body: Mapping[str, Any]) -> str:
    """Return the model that a request names. Raises `ApiError`."""
    model = body.get("model")
    if model is None:
        return DEFAULT
    if not isinstance(model, str):
        raise ApiError(ErrorForm.INVALID_TYPE, "model: it must be a string.", param="model")
    return model


def served_name(caller: Caller, requested: str, mapped: Mapping[str, str]) -> str:
    """Return the name that workers serve the requested model under. Raises `ApiError` 404 for a name that the caller
    may not use or that no worker can have."""
    served = mapped_name(requested, mapped)
    is_allowed = caller.models is None or bool({requested, served} & caller.models)
    if not is_allowed or not re.fullmatch(MODEL_NAME, served):
        raise model_not_found(requested)
    return served


def model_missing(served: Collection[str]) -> ApiError:
    """Return the error for a request without a model, if no worker has the name that it then stands for."""
    problem = f"it is missing, and no model is called {DEFAULT!r}; {describe_served(served)}."
    return ApiError(ErrorForm.MISSING_PARAMETER, f"model: {problem}", param="model")


def model_not_found(model: str) -> ApiError:
    """Return the error for a model that does not exist, as far as the caller may know."""
    return ApiError(ErrorForm.MODEL_NOT_FOUND, f"The model {model[:80]!r} does not exist.", param="model")
