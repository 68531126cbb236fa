"""`sluice check`: reports how a worker would run a model, without loading the weights."""

from collections import Counter
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.errors import CliError, needs_worker
from sluice.cli.options import AsJson
from sluice.cli.terminal.output import print_json, print_table
from sluice.cli.terminal.view import say_that_it_reads

if TYPE_CHECKING:
    from worker.engine.model.check import ModelReport
    from worker.engine.speculation.mtp_load import HeadReport

_ROW_LENGTHS = 2_048, 8_192, 32_768, 131_072  # in tokens
_MTP_WITHOUT_WEIGHTS = "the files lack its weights; SLUICE_MTP_MODEL can give them"

Facts = dict[str, Any]


def check(
    model: Annotated[str, typer.Argument(metavar="FOLDER_OR_HUB_ID", help="The model, as in SLUICE_MODEL.")],
    as_json: AsJson = False,
) -> None:
    """Report how a worker would run a model here, without its weights.

    Prints the memory that the model takes, the number of rows that fit in the rest, if rows can share a batch, and if
    the model reasons, accepts images, calls tools, and supports JSON schemas. For a model on the hub, the weights are
    not downloaded.

    The numbers of rows are predictions for speculation off, which include spare memory for rows that grow; a running
    worker measures and corrects them. SLUICE_MEMORY_GB, SLUICE_MEMORY_HEADROOM_GB, SLUICE_VISION and
    SLUICE_TRUST_MODEL_CODE apply as for a worker. Exit codes: 0, or 2 if a worker would not serve the model.

    \b
    Examples:
      sluice check models/tiny-chat
      sluice check mlx-community/Qwen3-4B-4bit --json | jq .token_bytes
    """
    facts = _inspect(model)
    if as_json:
        print_json(facts)
    elif facts.get("embeddings"):
        lines = {"architecture": facts["architecture"], "context": f"{facts['context']:,} tokens", "embeddings": "yes"}
        print_table(model, {"": "left", "for a worker": "left"}, lines.items())
    else:
        _print_model(facts)
        if facts["servable"]:
            _print_rows(facts)
    if not facts["servable"]:
        from worker.engine.model.load import not_served

        raise CliError(str(not_served(model, facts["blockers"])))


def _inspect(model: str) -> Facts:
    say_that_it_reads(model)
    with needs_worker():
        from worker.engine.checkpoint import embeds
        from worker.engine.model.load import model_folder
        from worker.errors import CannotStart
    try:
        if embeds(folder := model_folder(model, name=model, only=["*.json"]), model):
            return {"model": model, **_embedding_facts(folder, model)}
        return {"model": model, **_facts(_report_of(model))}
    except CannotStart as error:
        raise CliError(str(error)) from None


def _embedding_facts(folder: Path, model: str) -> Facts:
    from worker.engine.checkpoint import read_config
    from worker.engine.embedding import INSTALL
    from worker.engine.model.load import context_of

    config = read_config(folder, model)
    missing = f"It is an embedding model, which needs mlx-embeddings: {INSTALL}"
    blockers = [] if find_spec("mlx_embeddings") else [missing]
    kind, context = config["model_type"], context_of(config)
    return {
        "servable": not blockers, "blockers": blockers, "architecture": kind, "context": context, "embeddings": True,
    }  # fmt: skip


def _report_of(model: str) -> "ModelReport":
    """Return the report on a model, with the settings of a worker here. Raises `CannotStart`."""
    with needs_worker():
        from worker.engine.device import memory_for_model
        from worker.engine.model.check import check_model
        from worker.settings import read_settings
    settings = read_settings(model=model)
    memory = memory_for_model(settings.memory_gb, settings.memory_headroom_gb)
    return check_model(model, memory=memory, vision=settings.vision == "auto", trusted=settings.trust_model_code)


def blockers_of(model: str, name: str | None = None) -> list[str]:
    """Return why a worker here would not serve a model; nothing if it would. `name`: the hub id of a folder in the
    cache. Raises `CannotStart`."""
    with needs_worker():
        from worker.engine.checkpoint import embeds
        from worker.engine.model.load import model_folder
    if embeds(folder := model_folder(model, name=model, only=["*.json"]), name or model):
        blockers: list[str] = _embedding_facts(folder, name or model)["blockers"]
        return blockers
    return list(_report_of(model).blockers)


def _facts(report: "ModelReport") -> Facts:
    from worker.text.grammar.llg_tokenizer import llguidance_tokenizer
    from worker.text.output.formats import ModelFormat
    from worker.text.tokenizer import Vocabulary

    profile, format = report.profile, ModelFormat.of(report.tokenizer)
    count = max(profile.vocab, len(report.tokenizer.tokens))
    return {
        "servable": not report.blockers,
        "blockers": report.blockers,
        "architecture": report.config["model_type"],
        "weights_bytes": report.costs.weights_bytes,
        "bits": report.bits,
        "dtype": profile.dtype,
        "context": report.context,
        "layers": [asdict(layer) for layer in profile.layers],
        "token_bytes": profile.token_bytes,
        "state_bytes": report.costs.state_bytes,
        "batches": report.batches,
        "device": report.device,
        "limit_bytes": report.limit,
        "rows": _rows(report),
        "reasons": format.harmony or format.think is not None,
        "think": format.think,
        "tool_format": "harmony" if format.harmony else format.dialect and format.dialect.name,
        "tool_proof": format.proof,
        "schemas": llguidance_tokenizer(report.tokenizer, Vocabulary(report.tokenizer), count) is not None,
        "attention_layers": profile.attention_calls,
        "max_draft": report.drafting.max_draft,
        "draft_states": report.drafting.states,
        "drafts_unsupported_reason": report.drafting.unsupported_reason,
        "mtp": report.mtp.status == "yes",
        "mtp_kind": report.mtp.kind if report.mtp.status == "yes" else None,
        "mtp_unsupported_reason": _why_no_head(report.mtp),
        "vision": report.vision_unsupported_reason is None,
        "vision_unsupported_reason": report.vision_unsupported_reason,
        "encoder_bytes": report.encoder_bytes,
    }


def _why_no_head(head: "HeadReport") -> str | None:
    """Return why the model's head is not used; None if it is, or the model has none."""
    reasons = {"without weights": _MTP_WITHOUT_WEIGHTS, "unsupported": head.kind}
    return reasons.get(head.status)


def _rows(report: "ModelReport") -> list[dict[str, int]]:
    """Return how many rows of each length fit at once, up to the longest that the model or the memory allows."""
    costs, limit = report.costs, report.limit
    longest = min(report.context or _ROW_LENGTHS[-1], costs.max_tokens(limit))
    lengths = [*(tokens for tokens in _ROW_LENGTHS if tokens < longest), longest]
    return [{"tokens": tokens, "rows": costs.max_rows(tokens, limit)} for tokens in lengths if tokens]


def _print_model(facts: Facts) -> None:
    from worker.engine.memory import format_bytes

    weights = f"{facts['bits']} bits" if facts["bits"] else "not quantized"
    free = facts["limit_bytes"] - facts["weights_bytes"]
    lines = {
        "architecture": facts["architecture"],
        "weights": f"{format_bytes(facts['weights_bytes'])}, {weights}; computes in {facts['dtype']}",
        "device": facts["device"],
        "memory": f"{format_bytes(facts['limit_bytes'])}, {format_bytes(max(0, free))} of it after the weights",
        "context": f"{facts['context']:,} tokens" if facts["context"] else "not in the config",
        "cache layers": _layers(facts["layers"]),
        "a row takes": _row(facts),
        "batching": "yes" if facts["batches"] else "no",
        "reasoning": _reasoning(facts),
        "tool calls": _calls(facts),
        "schemas": "yes" if facts["schemas"] else "no: llguidance cannot read the tokenizer",
        "SpecPrefill": _specprefill(facts["attention_layers"]),
        "drafts": _drafts(facts),
        "MTP": _mtp(facts),
        "vision": _vision(facts),
    }
    print_table(facts["model"], {"": "left", "for a worker": "left"}, lines.items())


def _calls(facts: Facts) -> str:
    """Return the dialect of the model's calls, and how it was found."""
    if not facts["tool_format"]:
        return "no: the chat template shows no form that is known"
    how = {
        "read back": "what the chat template writes is read back",
        "by its markers": "by its markers; the chat template writes no call that could be read back",
        "none": "by the vocabulary",
    }
    return f"{facts['tool_format']}: {how[facts['tool_proof']]}"


def _drafts(facts: Facts) -> str:
    if not facts["max_draft"]:
        return f"no: {facts['drafts_unsupported_reason']}"
    states = {"none": "", "replay": "; recurrences are replayed", "stepping": "; recurrent layers run token by token"}
    return f"up to {facts['max_draft']} tokens{states[facts['draft_states']]}"


def _mtp(facts: Facts) -> str:
    if facts["mtp"]:
        used = "used unless SLUICE_SPECULATION=off" if facts["max_draft"] else "not used: there are no drafts"
        return f"a {facts['mtp_kind']} head, {used}"
    return f"a head that is not used: {reason}" if (reason := facts["mtp_unsupported_reason"]) else "no"


def _reasoning(facts: Facts) -> str:
    if facts["think"]:
        return _marked(facts["think"])
    return "yes" if facts["reasons"] else "no"


def _layers(layers: list[dict[str, Any]]) -> str:
    """Return the kinds of cache layers as text, such as `24 × recurrent, 8 × kv`."""
    kinds = Counter(f"{each['kind']}" + (f" of {each['window']:,}" if each["window"] else "") for each in layers)
    return ", ".join(f"{count} × {kind}" for kind, count in kinds.items())


def _row(facts: Facts) -> str:
    """Return the memory of a row as text, such as `96 kB a token, 12 kB for each of the last 512`."""
    from worker.engine.memory import format_bytes

    bytes_by_window = Counter[int | None]()
    for layer in facts["layers"]:
        bytes_by_window[layer["window"]] += layer["token_bytes"]
    parts = [
        f"{format_bytes(count)} " + (f"for each of the last {window:,}" if window else "a token")
        for window, count in bytes_by_window.items()
        if count
    ]
    if facts["state_bytes"]:
        parts.append(f"{format_bytes(facts['state_bytes'])} at any length")
    return ", ".join(parts)


def _marked(markers: tuple[str, str]) -> str:
    return " … ".join(filter(None, markers))


def _vision(facts: Facts) -> str:
    from worker.engine.memory import format_bytes

    if not facts["vision"]:
        return f"no. {facts['vision_unsupported_reason']}"
    encoder = format_bytes(facts["encoder_bytes"]) + " of the weights" if facts["encoder_bytes"] else "of unknown size"
    return f"yes, as {facts['architecture']}; vision encoder: {encoder}"


def _specprefill(attention_layers: int) -> str:
    return (
        f"can be a draft: {attention_layers} attention layers for scoring"
        if attention_layers
        else "no draft: no attention layers"
    )


def _print_rows(facts: Facts) -> None:
    from worker.engine.memory import MAX_ROWS

    print_table(
        f"Rows that fit at once with speculation off (at most {MAX_ROWS})",
        {"tokens per row": "right", "rows": "right"},
        [(f"{row['tokens']:,}", f"{row['rows']:,}") for row in facts["rows"]],
    )
