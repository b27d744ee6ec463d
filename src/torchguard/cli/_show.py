"""`torchguard show`."""

import sys
from typing import Annotated

import typer

from torchguard.cli import _facts, _views
from torchguard.cli._targets import AsJson, Directory, complete_id, find, open_store
from torchguard.cli._terminal import ExitCode, console, emit_json, safe

EXAMPLE = """
torchguard show 20261115-170102

torchguard show --file forward.py 20261115-170102
"""

Id = Annotated[
    str | None,
    typer.Argument(
        metavar="ID",
        help="An id, or the start of one. Without one, the newest.",
        show_default=False,
        autocompletion=complete_id,
    ),
]
File = Annotated[str | None, typer.Option("--file", "-f", help="Write out one of its files.", show_default=False)]


def show(id: Id = None, file: File = None, directory: Directory = None, as_json: AsJson = False) -> int:
    """Show one artifact: its graphs, files, recompiles and graph breaks."""
    artifact = find(open_store(directory), id)
    if file is not None:
        text = artifact.read_text(file)
        sys.stdout.write(safe(text) if sys.stdout.isatty() else text)
        return ExitCode.FINE
    known = _facts.of_artifact(artifact)
    if as_json:
        emit_json({**_views.summary(artifact), "files": artifact.manifest()["files"], "guards": known})
        return ExitCode.FINE
    shown = [*_views.details(artifact), *_views.recompiles(known), *_views.graph_breaks(known)]
    console().print(*shown, sep="\n")
    return ExitCode.FINE
