"""`torchguard diff`."""

from typing import Annotated

import typer

from torchguard.cli._targets import AsJson, Directory, complete_id, find_artifact, open_store
from torchguard.cli._terminal import ExitCode, console, plain, print_json

EXAMPLE = """
torchguard diff 20261115-170102 20261115-170355
"""

First = Annotated[str, typer.Argument(metavar="A", help="An id, or the start of one.", autocompletion=complete_id)]
Second = Annotated[str, typer.Argument(metavar="B", help="Another.", autocompletion=complete_id)]
_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def diff(a: First, b: Second, directory: Directory = None, as_json: AsJson = False) -> int:
    """Compare graphs, guards and metadata of two artifacts. Exits with 1 if they differ."""
    from torchguard import artifacts

    store = open_store(directory)
    difference = artifacts.diff(find_artifact(store, a), find_artifact(store, b))
    if as_json:
        print_json(difference.to_dict())
    else:
        for line in str(difference).splitlines():
            console().print(plain(line, _STYLES.get(line[:1], "")), soft_wrap=True)
    return ExitCode.OK if difference.same else ExitCode.FAILURE
