"""`torchguard list`."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from torchguard._sizes import format_size
from torchguard.cli._targets import (
    HOW_TO_CAPTURE,
    AsJson,
    Directory,
    artifact_data,
    foreign_entries,
    open_store,
    own_artifacts,
    read_manifest,
)
from torchguard.cli._terminal import (
    ExitCode,
    console,
    format_age,
    indent,
    model_name,
    narrow_width,
    plain,
    print_json,
    print_message,
    source_line,
    table,
)

if TYPE_CHECKING:
    from torchguard.artifacts import Artifact

EXAMPLE = """
torchguard list

torchguard list --json | jq -r '.artifacts[0].id'
"""


def list_artifacts(directory: Directory = None, as_json: AsJson = False) -> int:
    """List the captured artifacts, newest first."""
    store = open_store(directory)
    found = own_artifacts(store)
    if as_json:
        print_json({"root": str(store.root), "artifacts": [artifact_data(one) for one in found]})
    elif found:
        width = narrow_width()
        console(width=width).print(*(_stacked(found) if width else [_listing(found)]), sep="\n")
    if foreign := foreign_entries(store):
        are = "entry" if foreign == 1 else "entries"
        print_message(f"{store.root} also holds {foreign} {are} that torchguard did not write.", "dim")
    if not found:
        print_message(f"There are no artifacts in {store.root} yet. {HOW_TO_CAPTURE}")
    return ExitCode.OK if found else ExitCode.NOT_FOUND


def _stacked(artifacts: Sequence["Artifact"]) -> Iterator[RenderableType]:
    """A paragraph for each artifact: a table would need more columns."""
    for one in artifacts:
        yield plain(one.id, "bold")
        yield indent(f"{format_age(one.created)} old, {format_size(one.size)}")
        yield indent(_contents(one))


def _listing(artifacts: Sequence["Artifact"]) -> RenderableType:
    rows = ((one.id, format_age(one.created), format_size(one.size), _contents(one)) for one in artifacts)
    return table(("ID", "AGE", "SIZE", "COMPILED"), rows, right=("AGE", "SIZE"), whole=("ID", "AGE", "SIZE"))


def _contents(artifact: "Artifact") -> Text:
    manifest = read_manifest(artifact)
    if manifest is None:
        return plain(f"{artifact.state}: {artifact.problem}" if artifact.problem else artifact.state, "red")
    what = plain(f"{model_name(manifest['function'])} ({source_line(manifest['file'], manifest['line'])}) ")
    return what.append_text(plain(", ".join(graph["kind"] for graph in manifest["graphs"]), "dim"))
