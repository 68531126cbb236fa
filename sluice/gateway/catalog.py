"""`/v1/models`: the models that live workers serve or that are loaded for a job, their aliases, and their abilities."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sluice.contract.models import Model, loaded_share
from sluice.gateway.caller import Caller
from sluice.gateway.errors import Handler, anthropic_endpoint, endpoint
from sluice.gateway.gateway import Gateway
from sluice.gateway.workers import Worker, model_not_found, served_name
from sluice.presence import mapped_name

ANTHROPIC_HEADER = "anthropic-version"  # requests with this header get Anthropic's form
_ABILITIES = ("images", "tools", "reasoning", "embeddings")


def routes(gateway: Gateway) -> list[Route]:
    """Return the routes of the models."""

    async def listed(request: Request) -> Response:
        found = await _models(gateway, await gateway.authenticate(request))
        if ANTHROPIC_HEADER in request.headers:
            return JSONResponse(_model_page(list(found.values())))
        return JSONResponse({"object": "list", "data": list(found.values())})

    async def single(request: Request) -> Response:
        caller, name = await gateway.authenticate(request), request.path_params["id"]
        served_as = served_name(caller, name, gateway.settings.model_map)
        served_as = (await gateway.workers.aliases()).get(served_as, served_as)
        workers = [worker for worker in await gateway.workers.live() if worker.get("model") == served_as]
        supervised = (await gateway.workers.supervised()).get(served_as)
        if not workers and supervised is None:
            raise model_not_found(name)
        found = _model(name, served_as, workers, supervised)
        return JSONResponse(model_info(found) if ANTHROPIC_HEADER in request.headers else found)

    return [Route("/v1/models", _endpoint(listed)), Route("/v1/models/{id:path}", _endpoint(single))]


def _endpoint(handler: Handler) -> Handler:
    """Return the handler with its errors in the form of the client's interface."""

    async def chosen(request: Request) -> Response:
        of_form = anthropic_endpoint if ANTHROPIC_HEADER in request.headers else endpoint
        return await of_form(handler)(request)

    return chosen


async def _models(gateway: Gateway, caller: Caller) -> dict[str, dict[str, Any]]:
    found = gateway.workers
    mapped, supervised = gateway.settings.model_map, await found.supervised()
    return models(await found.live(), mapped, caller, aliases=await found.aliases(), supervised=supervised)


def models(
    workers: Sequence[Worker],
    mapped: Mapping[str, str],
    caller: Caller,
    *,
    aliases: Mapping[str, str],
    supervised: Mapping[str, Model],
) -> dict[str, dict[str, Any]]:
    """Return the caller's models by name: the whole names of the mapping, and those of the workers, of what supervisors
    load for a job (`supervised`), and of the `aliases`, that it leaves as they are. Names that only `*` stands for
    cannot be listed; each of them is found by itself."""
    served: dict[str, list[Worker]] = {name: [] for name in supervised}
    for worker in workers:
        served.setdefault(worker.get("model", ""), []).append(worker)
    served.pop("", None)
    models_of = {
        **{alias: model for alias, model in aliases.items() if model in served},
        **{name: name for name in served},
    }
    own = {name: name for name in models_of if mapped_name(name, mapped) == name}
    whole = {name: target for name, target in mapped.items() if not name.endswith("*") and target in models_of}
    return {
        name: _model(name, models_of[target], served[models_of[target]], supervised.get(models_of[target]))
        for name, target in sorted({**own, **whole}.items())
        if caller.models is None or {name, target} & caller.models
    }


def _model(name: str, served_as: str, workers: Sequence[Worker], supervised: Model | None) -> dict[str, Any]:
    """Return a model in OpenAI's form, with vLLM's `max_model_len` and ours under `sluice`. With several workers, the
    abilities that all of them have; without one, null: it is unknown what the model can."""
    loaded_at = [_number(worker.get("started_at")) for worker in workers]
    since = loaded_at or [_number(str(supervised["since"]) if supervised else None)]
    contexts = [int(_number(worker.get("context_tokens"))) for worker in workers if "context_tokens" in worker]
    abilities = {name: all(worker.get(name) == "yes" for worker in workers) if workers else None for name in _ABILITIES}
    state = "loaded" if workers or supervised is None else supervised["state"]
    return {
        "id": name,
        "object": "model",
        "created": int(min(since)),
        "owned_by": "sluice",
        "max_model_len": min(contexts, default=None),
        "sluice": {
            "model": served_as,
            "state": state,
            **({"loaded": round(loaded_share(supervised), 3)} if supervised and state == "loading" else {}),
            **abilities,
            "workers": len(workers),
            "rows": sum(int(_number(worker.get("rows"))) for worker in workers),
            "max_rows": sum(int(_number(worker.get("max_rows"))) for worker in workers),
        },
    }


def _number(text: str | None) -> float:
    """Return the number; 0 for anything else, since any client of the server can write these fields."""
    try:
        number = float(text or 0)
    except ValueError:
        return 0.0
    end_of_dates = 253_402_300_799  # the year 9999 in Unix seconds: Python's datetime ends there
    return number if 0 <= number <= end_of_dates else 0.0


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


def _model_page(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the list of all models, which is one page."""
    page = [model_info(model) for model in models]
    ids = [info["id"] for info in page] or [None]
    return {"data": page, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}
