"""Lines of code, as short as they can be told."""

import os

_HOME = os.getcwd()  # where the command was started: a script may go elsewhere


def place(file: str, line: int) -> str:
    """`src/model.py:12`, from the current directory where the file lies below it."""
    below = os.path.relpath(file, _HOME) if os.path.isabs(file) else file
    return f"{file if below.startswith('..') else below}:{line}"
