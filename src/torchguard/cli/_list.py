"""`torchguard list`."""

from torchguard.cli import _views
from torchguard.cli._targets import HOW_TO_MAKE_SOME, AsJson, Directory, open_store, own_artifacts
from torchguard.cli._terminal import ExitCode, console, emit_json, say

EXAMPLE = """
torchguard list

torchguard list --json | jq -r '.artifacts[0].id'
"""


def list_artifacts(directory: Directory = None, as_json: AsJson = False) -> int:
    """Show what was captured, the newest first."""
    store = open_store(directory)
    found = own_artifacts(store)
    if as_json:
        emit_json({"root": str(store.root), "artifacts": [_views.summary(one) for one in found]})
    elif found:
        console().print(_views.listing(found))
    if foreign := sum(1 for _ in store) - len(found):
        say(f"{store.root} also holds {foreign} that torchguard did not write.", "dim")
    if not found:
        say(f"There are no artifacts in {store.root} yet. {HOW_TO_MAKE_SOME}")
    return ExitCode.FINE if found else ExitCode.NOTHING
