"""A line on the terminal while something is compiled."""

import sys
import time

from rich.console import Console
from rich.live import Live
from rich.text import Text


class CompilingLine:
    """`compiling 0/0 ... 3 s`, on stderr, gone when it is done; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._compile_id, self._started = "", 0.0

    def install(self) -> None:
        from torchguard.cli import _torch  # loads torch

        if sys.stderr.isatty():
            _torch.on_compiling(self._start, self._end)

    def _start(self, compile_id: str) -> None:
        self._compile_id, self._started = compile_id, time.monotonic()
        # The script's own stdout and stderr stay as they are.
        self._live = Live(
            console=Console(stderr=True),
            get_renderable=self._line,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def _end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self) -> Text:
        return Text(f"torchguard: compiling {self._compile_id}, {time.monotonic() - self._started:.0f} s", style="dim")
