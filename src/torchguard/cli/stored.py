"""Artifacts by the id that a user typed."""

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchguard.cli.exits import CommandError, ExitCode
from torchguard.exceptions import NoSuchArtifactError

if TYPE_CHECKING:
    from torchguard.artifacts import Artifact, Store

HOW_TO_MAKE_SOME = "Make some: torchguard run SCRIPT, or artifacts.capture() around what you compile."

Directory = Annotated[
    Path | None,
    typer.Option(
        "--dir", "-d", help="Where artifacts are [TORCHGUARD_ARTIFACTS, else debug_artifacts].", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else.")]


def root_of(given: Path | None) -> Path:
    """Where artifacts are, as `artifacts.Store` has it, without torch."""
    return Path.cwd() / (given or os.environ.get("TORCHGUARD_ARTIFACTS") or "debug_artifacts")


def complete_id(ctx: typer.Context) -> list[str]:
    """The ids that a shell may offer, the newest first; without torch, which `Store` loads."""
    found = root_of(ctx.params.get("directory")).glob("*/manifest.json")
    return sorted((path.parent.name for path in found), reverse=True)


def open_store(directory: Path | None) -> "Store":
    from torchguard.artifacts import Store

    return Store(directory)


def own_artifacts(store: "Store") -> list["Artifact"]:
    return [artifact for artifact in store if artifact.state != "foreign"]


def find(store: "Store", id: str | None) -> "Artifact":
    """The artifact meant by an id or the start of one; the newest whole one if there is none."""
    artifacts = own_artifacts(store)
    if not artifacts:
        raise CommandError(f"There are no artifacts in {store.root} yet. {HOW_TO_MAKE_SOME}", ExitCode.NOTHING)
    if id is not None and not any(artifact.id.startswith(id) for artifact in artifacts):
        close = difflib.get_close_matches(id, [artifact.id for artifact in artifacts], n=3, cutoff=0.5)
        instead = f"Did you mean {' or '.join(close)}?" if close else "torchguard list shows what there is."
        raise CommandError(f"There is no artifact {id!r} in {store.root}. {instead}", ExitCode.NOTHING)
    try:
        return store.find(id)
    except NoSuchArtifactError as error:  # all are half-written, or several are meant
        raise CommandError(str(error), ExitCode.NOTHING) from error
