"""`elastic export`: a run's policy as a directory that transformers and vLLM load."""

from pathlib import Path
from typing import Annotated

import typer

from elastic.cli.account import run_on_disk
from elastic.cli.options import AsJson, RunName, RunsDirectory
from elastic.cli.output import console, emit
from elastic.compose.export import export as export_policy
from elastic.config import given_path


def export(
    name: RunName = "latest",
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="DIR", help="Where to: a directory that is empty or not there yet.")
    ] = "",
    step: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="The step whose policy it is; the newest that was saved.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a run that trains an adapter: the whole policy, with the adapter in it.")
    ] = False,
    as_json: AsJson = False,
    directory: RunsDirectory = Path("runs"),
) -> int:
    """Write a run's policy as a Hugging Face directory, with its tokenizer and a model card.

    What is there afterwards is a base policy like any other: for transformers, for vLLM, and for another run
    (`--set model.checkpoint=DIR`). A run that trains an adapter (LoRA) gives that, in peft's form, unless --merge says
    that it be added to the base.

    Example: elastic export latest -o policy
    """
    run = run_on_disk(directory, name)
    found = export_policy(run, given_path(output or f"{run.name}-policy"), step, merge=merge)
    if as_json:
        emit(found)
    else:
        words = f"step {found.step} of {found.run}: {found.tensors} tensors, {found.size_bytes / 1e6:,.1f} MB"
        console().print(f"{words}, in {found.directory}", soft_wrap=True, highlight=False)
    return 0
