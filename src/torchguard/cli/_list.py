"""`torchguard list`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from torchguard.cli._targets import (
    HOW_TO_CAPTURE,
    AsJson,
    Directory,
    artifact_data,
    open_store,
    own_artifacts,
    read_manifest,
)
from torchguard.cli._terminal import (
    ExitCode,
    console,
    format_age,
    format_bytes,
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
        console().print(_listing(found))
    if foreign := sum(1 for _ in store) - len(found):
        print_message(f"{store.root} also holds {foreign} that torchguard did not write.", "dim")
    if not found:
        print_message(f"There are no artifacts in {store.root} yet. {HOW_TO_CAPTURE}")
    return ExitCode.OK if found else ExitCode.NOT_FOUND


def _listing(artifacts: Sequence["Artifact"]) -> RenderableType:
    rows = ((one.id, format_age(one.created), format_bytes(one.size), _contents(one)) for one in artifacts)
    return table(("ID", "AGE", "SIZE", "COMPILED"), rows, right=("AGE", "SIZE"), whole=("ID", "AGE", "SIZE"))


def _contents(artifact: "Artifact") -> Text:
    manifest = read_manifest(artifact)
    if manifest is None:
        return plain(f"{artifact.state}: {artifact.problem}" if artifact.problem else artifact.state, "red")
    what = plain(f"{manifest['function']} ({source_line(manifest['file'], manifest['line'])}) ")
    return what.append_text(plain(", ".join(graph["kind"] for graph in manifest["graphs"]), "dim"))
