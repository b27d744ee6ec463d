"""`torchguard show`."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from torchguard._sizes import format_size
from torchguard.cli import _views
from torchguard.cli._targets import AsJson, Directory, artifact_data, complete_id, find_artifact, open_store
from torchguard.cli._terminal import ExitCode, console, model_name, plain, print_json, safe, source_line, table

if TYPE_CHECKING:
    from torchguard.artifacts import Artifact

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
File = Annotated[str | None, typer.Option("--file", "-f", help="Write one of its files to stdout.", show_default=False)]


def show(id: Id = None, file: File = None, directory: Directory = None, as_json: AsJson = False) -> int:
    """Show one artifact: its graphs, files, recompiles and graph breaks."""
    artifact = find_artifact(open_store(directory), id)
    if file is not None:
        text = artifact.read_text(file)
        sys.stdout.write(safe(text) if sys.stdout.isatty() else text)
        return ExitCode.OK
    compiled = _views.artifact_compilations(artifact)
    if as_json:
        print_json({**artifact_data(artifact), "files": artifact.manifest()["files"], "guards": compiled})
        return ExitCode.OK
    views = [*_details(artifact), *_views.recompiles(compiled), *_views.graph_breaks(compiled)]
    console().print(*views, sep="\n")
    return ExitCode.OK


def _details(artifact: "Artifact") -> Iterator[RenderableType]:
    """Graphs, files and notes of an artifact, but not its guards."""
    manifest = artifact.manifest()
    where = source_line(manifest["file"], manifest["line"])
    yield plain(
        f"{model_name(manifest['function'])} ({where}), {manifest['compile_id']}, for {manifest['backend']}", "bold"
    )
    yield plain(f"{artifact.path}, {format_size(artifact.size)}, {artifact.created.astimezone():%Y-%m-%d %H:%M:%S}")
    yield table(
        ("GRAPH", "KIND", "NODES", "FILES"),
        [(g["name"], g["kind"], g["nodes"], ", ".join(g["files"].values())) for g in manifest["graphs"]],
        right=("NODES",),
    )
    of_graphs = {file for graph in manifest["graphs"] for file in graph["files"].values()}
    if others := [name for name in manifest["files"] if name not in of_graphs]:
        yield plain(f"Other files: {', '.join(others)}")
    yield from (plain(f"Not written yet: {one}", "yellow") for one in manifest["waiting_for"])
    yield from (plain(note, "yellow") for note in manifest["notes"])
