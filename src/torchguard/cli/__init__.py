"""The command `torchguard`. Nothing here loads torch: a verb does, when it needs it."""

import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from torchguard.cli.commands import analyze, clean, diff, doctor, run, show
from torchguard.cli.commands import list as listing
from torchguard.cli.exits import ExitCode
from torchguard.cli.terminal import say
from torchguard.exceptions import TorchGuardError

__all__ = ["app", "main"]

_VERBS = (
    ("run", run.run, run.EXAMPLE),
    ("list", listing.list_artifacts, listing.EXAMPLE),
    ("show", show.show, show.EXAMPLE),
    ("diff", diff.diff, diff.EXAMPLE),
    ("clean", clean.clean, clean.EXAMPLE),
    ("analyze", analyze.analyze, analyze.EXAMPLE),
    ("doctor", doctor.doctor, doctor.EXAMPLE),
)


class _Verbs(TyperGroup):
    """Ends with what a verb returns, and says an error of torchguard's in a sentence."""

    def invoke(self, ctx: Any) -> Any:
        try:
            code = super().invoke(ctx)
        except TorchGuardError as error:
            say(f"torchguard: {error}", "red")
            code = getattr(error, "exit_code", ExitCode.FOUND)
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise
            say(f"torchguard: {error}", "red")
            code = ExitCode.FOUND
        raise typer.Exit(int(code or 0))


app = typer.Typer(
    name="torchguard",
    cls=_Verbs,
    help="See into what torch.compile makes of a program: run it, keep what was compiled, look at it, check it.",
    epilog="Ends with 0 if all is well, 1 if something was found or failed, 2 for wrong usage, 3 if there is nothing "
    "to show. run ends as the script does, and with 4 where --strict says so.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _verb, _example in _VERBS:
    # Behind the first argument, options are the script's.
    _settings = {"allow_interspersed_args": False} if _name == "run" else {}
    app.command(_name, epilog=f"Examples:\n{_example}", context_settings=_settings)(_verb)


def main() -> NoReturn:
    # The command itself, and not the app, which would set an excepthook that the script had to live with.
    command = typer.main.get_command(app)
    try:
        command.main(prog_name="torchguard")
    except run.Interrupted:
        sys.excepthook = lambda *_: None  # its traceback was shown
        raise KeyboardInterrupt from None
    raise SystemExit(0)
