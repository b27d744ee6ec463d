"""Artifacts: a list of them, one of them, what is to be removed."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from torchguard.cli.amounts import ago
from torchguard.cli.terminal import bytes_shown, count_shown, plain, table
from torchguard.cli.views.places import place
from torchguard.exceptions import TorchGuardError

if TYPE_CHECKING:
    from torchguard.artifacts import Artifact, Removal

_OF_MANIFEST = ("compile_id", "function", "file", "line", "backend", "graphs", "waiting_for", "notes")


def summary(artifact: "Artifact") -> dict[str, Any]:
    """An artifact as data; of one that cannot be read, what is known without reading it."""
    known = {
        "id": artifact.id,
        "path": str(artifact.path),
        "created": artifact.created.isoformat(),
        "state": artifact.state,
        "problem": artifact.problem,
        "size": artifact.size,
    }
    manifest = _manifest(artifact)
    return known | ({name: manifest[name] for name in _OF_MANIFEST} if manifest else {})


def listing(artifacts: Sequence["Artifact"]) -> RenderableType:
    rows = ((one.id, ago(one.created), bytes_shown(one.size), _about(one)) for one in artifacts)
    return table(("ID", "AGE", "SIZE", "COMPILED"), rows, right=("AGE", "SIZE"), whole=("ID", "AGE", "SIZE"))


def details(artifact: "Artifact") -> Iterator[RenderableType]:
    """What an artifact has in it, apart from its guards."""
    manifest = artifact.manifest()
    where = place(manifest["file"], manifest["line"])
    yield plain(f"{manifest['function']} ({where}), {manifest['compile_id']}, for {manifest['backend']}", "bold")
    yield plain(f"{artifact.path}, {bytes_shown(artifact.size)}, {artifact.created.astimezone():%Y-%m-%d %H:%M:%S}")
    yield table(
        ("GRAPH", "KIND", "NODES", "FILES"),
        [(g["name"], g["kind"], g["nodes"], ", ".join(g["files"].values())) for g in manifest["graphs"]],
        right=("NODES",),
    )
    named = {file for graph in manifest["graphs"] for file in graph["files"].values()}
    if others := [name for name in manifest["files"] if name not in named]:
        yield plain(f"Also: {', '.join(others)}")
    yield from (plain(f"Still to come: {one}", "yellow") for one in manifest["waiting_for"])
    yield from (plain(note, "yellow") for note in manifest["notes"])


def removals(found: Sequence["Removal"], is_done: bool) -> Iterator[RenderableType]:
    rows = ((one.artifact.id, bytes_shown(one.artifact.size), one.why) for one in found)
    yield table(("ID", "SIZE", "WHY"), rows, right=("SIZE",), whole=("ID", "SIZE"))
    total = bytes_shown(sum(one.artifact.size for one in found))
    yield plain(f"{count_shown(len(found), 'artifact')}, {total}{' removed' if is_done else ''}.", "bold")


def _about(artifact: "Artifact") -> Text:
    manifest = _manifest(artifact)
    if artifact.state != "whole" or manifest is None:
        return plain(f"{artifact.state}: {artifact.problem}" if artifact.problem else artifact.state, "red")
    what = plain(f"{manifest['function']} ({place(manifest['file'], manifest['line'])}) ")
    return what.append_text(plain(", ".join(graph["kind"] for graph in manifest["graphs"]), "dim"))


def _manifest(artifact: "Artifact") -> dict[str, Any] | None:
    if artifact.state != "whole":
        return None
    try:
        return artifact.manifest()
    except TorchGuardError:  # it changed since it was listed, and is shown as what cannot be read
        return None
