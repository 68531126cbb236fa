"""`sluice check`: what a model will get, before its weights are loaded."""

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.errors import INSTALL_WORKER, CliError
from sluice.cli.options import AsJson
from sluice.cli.terminal.output import print_json, print_table

if TYPE_CHECKING:
    from worker.engine.model.check import ModelReport

_LENGTHS = 2_048, 8_192, 32_768, 131_072  # of rows, in tokens: what to ask of a model
_MTP = {"yes": "yes", "no": "no", "without weights": "no: the config tells of it, but the weights are not in the files"}

Facts = dict[str, Any]


def check(
    model: Annotated[str, typer.Argument(metavar="FOLDER_OR_HUB_ID", help="What SLUICE_MODEL would be.")],
    as_json: AsJson = False,
) -> None:
    """Tell what a model will get from a worker on this machine, without loading its weights.

    How much memory it takes, and how many rows that leaves room for; whether rows can share a batch; whether it
    reasons, sees images, calls tools, and can be held to a schema. Of a model on the hub the weights are not even
    downloaded.

    What fits is predicted, with the room that a batch keeps for growing; a running worker measures, and corrects.
    SLUICE_MEMORY_GB, SLUICE_MEMORY_HEADROOM_GB, SLUICE_VISION and SLUICE_TRUST_MODEL_CODE count as they do for a
    worker.
    Exit codes: 0, or 2 where a worker would not serve the model.

    \b
    Examples:
      sluice check models/tiny-chat
      sluice check mlx-community/Qwen3-4B-4bit --json | jq .token_bytes
    """
    facts = _look(model)
    if as_json:
        print_json(facts)
    else:
        _print_model(facts)
        if facts["servable"]:
            _print_rows(facts)
    if not facts["servable"]:
        raise CliError(f"{model} cannot be served. {' '.join(facts['blockers'])}")


def _look(model: str) -> Facts:
    try:
        from worker.engine.device import memory_for_model
        from worker.engine.model.check import check
        from worker.errors import CannotStart
        from worker.settings import read_settings
    except ImportError as missing:
        raise CliError(f"the worker is not installed here ({missing}): {INSTALL_WORKER}") from None
    try:
        settings = read_settings(model=model)
        memory = memory_for_model(settings.memory_gb, settings.memory_headroom_gb)
        vision, trusted = settings.vision == "auto", settings.trust_model_code
        return {"model": model, **_facts(check(model, memory=memory, vision=vision, trusted=trusted))}
    except CannotStart as error:
        raise CliError(str(error)) from None


def _facts(checked: "ModelReport") -> Facts:
    from worker.text.grammar.guide import llguidance_tokenizer
    from worker.text.output.formats import ModelFormat

    anatomy, dialect = checked.profile, ModelFormat(checked.tokenizer)
    return {
        "servable": not checked.blockers,
        "blockers": checked.blockers,
        "architecture": checked.config["model_type"],
        "weights_bytes": checked.costs.weights_bytes,
        "bits": checked.bits,
        "dtype": anatomy.dtype,
        "context": checked.context,
        "layers": [asdict(layer) for layer in anatomy.layers],
        "token_bytes": anatomy.token_bytes,
        "state_bytes": checked.costs.state_bytes,
        "batches": checked.batches,
        "device": checked.device,
        "limit_bytes": checked.limit,
        "rows": _rows(checked),
        "reasons": bool(dialect.think_start),
        "think": dialect.think,
        "tool": checked.tokenizer.tool,
        "tool_format": checked.tokenizer.tool_format,
        "schemas": llguidance_tokenizer(checked.tokenizer, anatomy.vocab) is not None,
        "attention_layers": anatomy.attention_calls,
        "mtp": checked.mtp,
        "vision": checked.vision_unsupported_reason is None,
        "vision_why_not": checked.vision_unsupported_reason,
        "encoder_bytes": checked.encoder_bytes,
    }


def _rows(checked: "ModelReport") -> list[dict[str, int]]:
    """How many fit together, by length, up to the longest that the model takes."""
    costs, limit = checked.costs, checked.limit
    longest = min(checked.context or _LENGTHS[-1], costs.max_tokens(limit))
    lengths = [*(tokens for tokens in _LENGTHS if tokens < longest), longest]
    return [{"tokens": tokens, "rows": costs.max_rows(tokens, limit)} for tokens in lengths if tokens]


def _print_model(facts: Facts) -> None:
    from worker.schedule.memory import format_bytes

    weights = f"{facts['bits']} bits" if facts["bits"] else "not quantized"
    beside = facts["limit_bytes"] - facts["weights_bytes"]
    lines = {
        "architecture": facts["architecture"],
        "weights": f"{format_bytes(facts['weights_bytes'])}, {weights}; computes in {facts['dtype']}",
        "memory": f"{format_bytes(facts['limit_bytes'])} on {facts['device']}, {format_bytes(max(0, beside))} of it "
        "beside the weights",
        "context": f"{facts['context']:,} tokens" if facts["context"] else "the config does not say",
        "cache layers": _layers(facts["layers"]),
        "a row takes": _row(facts),
        "batching": "yes" if facts["batches"] else "no",
        "reasoning": _marked(facts["think"]) if facts["think"] else "yes" if facts["reasons"] else "no",
        "tool calls": f"{facts['tool_format'] or 'yes'}: {_marked(facts['tool'])}" if facts["tool"] else "no",
        "schemas": "yes" if facts["schemas"] else "no: llguidance cannot read the tokenizer",
        "SpecPrefill": _specprefill(facts["attention_layers"]),
        "MTP": _MTP[facts["mtp"]],
        "vision": _vision(facts),
    }
    print_table(facts["model"], {"": "left", "what a worker finds": "left"}, lines.items())


def _layers(layers: list[dict[str, Any]]) -> str:
    """`24 × recurrent, 8 × kv`"""
    kinds = Counter(f"{each['kind']}" + (f" of {each['window']:,}" if each["window"] else "") for each in layers)
    return ", ".join(f"{count} × {kind}" for kind, count in kinds.items())


def _row(facts: Facts) -> str:
    """`96 kB a token, 12 kB for each of the last 512`"""
    from worker.schedule.memory import format_bytes

    kept = Counter[int | None]()
    for layer in facts["layers"]:
        kept[layer["window"]] += layer["token_bytes"]
    parts = [
        f"{format_bytes(count)} " + (f"for each of the last {window:,}" if window else "a token")
        for window, count in kept.items()
        if count
    ]
    if facts["state_bytes"]:
        parts.append(f"{format_bytes(facts['state_bytes'])} whatever its length")
    return ", ".join(parts)


def _marked(markers: tuple[str, str]) -> str:
    return " … ".join(filter(None, markers))


def _vision(facts: Facts) -> str:
    from worker.schedule.memory import format_bytes

    if not facts["vision"]:
        return f"no. {facts['vision_why_not']}"
    tower = (
        format_bytes(facts["encoder_bytes"]) + " of the weights"
        if facts["encoder_bytes"]
        else "its weights are not counted"
    )
    return f"yes, as {facts['architecture']}; the tower: {tower}"


def _specprefill(attention_layers: int) -> str:
    return (
        f"as a draft: {attention_layers} attention layers to score by" if attention_layers else "no draft: no attention"
    )


def _print_rows(facts: Facts) -> None:
    from worker.schedule.memory import MAX_ROWS

    print_table(
        f"Rows that fit at once ({MAX_ROWS} at most)",
        {"tokens, prompt and answer": "right", "rows": "right"},
        [(f"{row['tokens']:,}", f"{row['rows']:,}") for row in facts["rows"]],
    )
