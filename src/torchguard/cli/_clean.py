"""`torchguard clean`."""

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from torchguard.cli import _views
from torchguard.cli._targets import AsJson, Directory, open_store
from torchguard.cli._terminal import CommandError, ExitCode, age_of, console, emit_json, say, stderr

if TYPE_CHECKING:
    from torchguard.artifacts import Removal

EXAMPLE = """
torchguard clean --keep 20 --max-size 1GiB

torchguard clean --all --yes
"""

_DEFAULT_AGE = timedelta(days=7)

OlderThan = Annotated[str | None, typer.Option(help="Remove what is older: 30m, 12h, 7d, 2w [7d].", show_default=False)]
Keep = Annotated[int | None, typer.Option(min=0, help="Keep so many, the newest.", show_default=False)]
MaxSize = Annotated[str | None, typer.Option(help="Keep so much: 500MB, 1GiB.", show_default=False)]
All = Annotated[bool, typer.Option("--all", help="Remove all of them.")]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Only tell what would be removed.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def clean(
    older_than: OlderThan = None,
    keep: Keep = None,
    max_size: MaxSize = None,
    remove_all: All = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    directory: Directory = None,
    as_json: AsJson = False,
) -> int:
    """Remove artifacts by age, number or size: what is older than a week, if nothing is said.

    What torchguard did not write stays, and so does what is being written.
    """
    if remove_all and (older_than or keep is not None or max_size):
        raise CommandError("--all goes with neither --older-than, --keep nor --max-size.", ExitCode.USAGE)
    has_rule = older_than or keep is not None or max_size or remove_all
    rules = {
        "older_than": age_of(older_than) if older_than else None if has_rule else _DEFAULT_AGE,
        "keep": 0 if remove_all else keep,
        "max_bytes": _bytes_of(max_size) if max_size else None,
    }
    store = open_store(directory)
    found = store.clean(**rules, dry_run=True)
    if found and not dry_run:
        if not yes:
            _ask(found)
        found = store.remove(found)
    if as_json:
        told = [{"id": one.artifact.id, "size": one.artifact.size, "why": one.why} for one in found]
        emit_json({"root": str(store.root), "is_dry_run": dry_run, "removed": told})
    elif found:
        console().print(*_views.removals(found, is_done=not dry_run), sep="\n")
    else:
        say(f"There is nothing to remove in {store.root}.")
    return ExitCode.FINE


def _bytes_of(size: str) -> int:
    from torchguard._sizes import parse_size

    try:
        return parse_size(size)
    except ValueError as error:
        raise CommandError(f"--max-size: {error}", ExitCode.USAGE) from error


def _ask(found: list["Removal"]) -> None:
    if not sys.stdin.isatty():
        raise CommandError(
            f"clean would remove {len(found)}, and there is nobody to ask: say --yes, or --dry-run to see them.",
            ExitCode.USAGE,
        )
    stderr().print(*_views.removals(found, is_done=False), sep="\n")
    typer.confirm("Remove them?", abort=True, err=True)
