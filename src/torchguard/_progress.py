"""Progress of long work, in one line on stderr: on a terminal alone, and erased at the end."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

Show = Callable[[str], None]
_PAUSE = 0.1  # seconds between two texts that are drawn at once; the others appear four times a second


_shown = threading.local()  # `show` is that of the block that is open in this thread


@contextlib.contextmanager
def progress_line(wanted: bool | None = None) -> Iterator[Show]:
    """A function that shows what is being done, and for how long.

    A block within another uses its line. Nothing is shown where stderr is no terminal, unless it is `wanted`: then each
    text has a line of its own.
    """
    stream, outer = sys.stderr, getattr(_shown, "show", None)
    is_terminal = _is_terminal(stream)
    if outer is not None:
        yield outer
    elif wanted is False or not (is_terminal or wanted):
        yield lambda text: None
    elif not is_terminal:
        yield lambda text: print(text, file=stream, flush=True)
    else:
        with _live_line() as show:
            _shown.show = show
            try:
                yield show
            finally:
                _shown.show = None


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # a program may have set it to None or another object, or closed it
        return False


@contextlib.contextmanager
def _live_line() -> Iterator[Show]:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    text, start, drawn = "", time.monotonic(), 0.0

    def line() -> Text:
        took = time.monotonic() - start
        return Text(f"{text}{f', {took:.0f} s' if took >= 1 else ''}", style="dim", overflow="ellipsis", no_wrap=True)

    def show(shown: str) -> None:
        nonlocal text, drawn
        text = shown
        if time.monotonic() - drawn > _PAUSE:
            live.refresh()
            drawn = time.monotonic()

    # rich must not redirect the user's stdout and stderr.
    console = Console(stderr=True, highlight=False, markup=False)
    live = Live(console=console, get_renderable=line, transient=True, redirect_stdout=False, redirect_stderr=False)
    with live:
        yield show
