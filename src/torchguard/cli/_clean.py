"""`torchguard clean`."""

import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from torchguard._sizes import format_size
from torchguard.cli._targets import AsJson, Directory, open_store
from torchguard.cli._terminal import (
    CommandError,
    ExitCode,
    console,
    parse_age,
    plain,
    plural,
    print_json,
    print_message,
    stderr,
    table,
)

if TYPE_CHECKING:
    from torchguard.artifacts import Removal

EXAMPLE = """
torchguard clean --keep 20 --max-size 1GiB

torchguard clean --all --yes
"""

_DEFAULT_AGE = timedelta(days=7)

OlderThan = Annotated[
    str | None, typer.Option(help="Remove older artifacts: 30m, 12h, 7d, 2w [7d].", show_default=False)
]
Keep = Annotated[
    int | None, typer.Option(min=0, help="Keep this many, the newest, whatever their age and size.", show_default=False)
]
MaxSize = Annotated[str | None, typer.Option(help="Keep at most this size: 500MB, 1GiB.", show_default=False)]
All = Annotated[bool, typer.Option("--all", help="Remove all artifacts.")]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Only show what would be removed.")]
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
    """Remove artifacts by age, number or size; without an option, those older than a week.

    Files that torchguard did not write stay, and so do artifacts that are being written.
    """
    if remove_all and (older_than or keep is not None or max_size):
        raise CommandError("--all cannot be combined with --older-than, --keep or --max-size.", ExitCode.USAGE)
    has_rule = older_than or keep is not None or max_size or remove_all
    rules = {
        "older_than": parse_age(older_than) if older_than else None if has_rule else _DEFAULT_AGE,
        "keep": 0 if remove_all else keep,
        "max_bytes": _parse_size(max_size) if max_size else None,
    }
    store = open_store(directory)
    removals = store.clean(**rules, dry_run=True)
    if removals and not dry_run:
        if not yes:
            _confirm(removals)
        removals = store.remove(removals)
    if as_json:
        removed = [{"id": one.artifact.id, "size": one.artifact.size, "why": one.why} for one in removals]
        print_json({"root": str(store.root), "is_dry_run": dry_run, "removed": removed})
    elif removals:
        console().print(*_removals_table(removals, is_done=not dry_run), sep="\n")
    else:
        print_message(f"There is nothing to remove in {store.root}.")
    return ExitCode.OK


def _parse_size(size: str) -> int:
    from torchguard._sizes import parse_size

    try:
        return parse_size(size)
    except ValueError as error:
        raise CommandError(f"--max-size: {error}", ExitCode.USAGE) from error


def _confirm(removals: Sequence["Removal"]) -> None:
    if not sys.stdin.isatty():
        raise CommandError(
            f"clean would remove {plural(len(removals), 'artifact')}, and stdin is no terminal to ask on. "
            "Give --yes to remove, or --dry-run to see them.",
            ExitCode.USAGE,
        )
    stderr().print(*_removals_table(removals, is_done=False), sep="\n")
    typer.confirm("Remove them?", abort=True, err=True)


def _removals_table(removals: Sequence["Removal"], is_done: bool) -> Iterator[RenderableType]:
    rows = ((one.artifact.id, format_size(one.artifact.size), one.why) for one in removals)
    yield table(("ID", "SIZE", "WHY"), rows, right=("SIZE",), whole=("ID", "SIZE"))
    total = format_size(sum(one.artifact.size for one in removals))
    yield plain(f"{plural(len(removals), 'artifact')}, {total}{' removed' if is_done else ''}.", "bold")
