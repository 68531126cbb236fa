"""`sluice batch`: files and tables of requests, run offline."""

import typer

from sluice.cli.commands.batch.compare import compare_prompts
from sluice.cli.commands.batch.run import rerun_lines, run_file
from sluice.cli.commands.batch.runs import cancel_run, feed_folder, list_runs, results, status, submit_run
from sluice.cli.commands.batch.schedule import schedule

batch = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@batch.callback()
def _about() -> None:
    """Run files of requests offline, in OpenAI's Batch format.

    Interactive jobs go first. Each line of the input is a request, and each line of the output an answer:

    \b
      {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

    \b
    Example:
      sluice batch run in.jsonl -o out.jsonl
    """


batch.command("run")(run_file)
batch.add_typer(schedule, name="schedule")
batch.command("feed", hidden=True)(feed_folder)
batch.command("submit")(submit_run)
batch.command("status")(status)
batch.command("list")(list_runs)
batch.command("cancel")(cancel_run)
batch.command("results")(results)
batch.command("rerun")(rerun_lines)
batch.command("compare")(compare_prompts)
