"""The command `torchguard`.

Only `_rebuild` and `_watched` import torch when they are imported, and verbs import these when they need them. So
`--help`, `--version` and shell completion start without torch, and `run` leaves it to the script to load it.
"""

import importlib.metadata
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from torchguard import __version__
from torchguard.cli import _analyze, _clean, _diff, _doctor, _lint, _list, _report, _run, _script_options, _show
from torchguard.cli._terminal import ExitCode, console, plain, print_message
from torchguard.exceptions import TorchGuardError

__all__ = ["app", "main"]

_VERBS = (
    ("run", _run.run, _run.EXAMPLE),
    ("list", _list.list_artifacts, _list.EXAMPLE),
    ("show", _show.show, _show.EXAMPLE),
    ("diff", _diff.diff, _diff.EXAMPLE),
    ("clean", _clean.clean, _clean.EXAMPLE),
    ("analyze", _analyze.analyze, _analyze.EXAMPLE),
    ("report", _report.report, _report.EXAMPLE),
    ("lint", _lint.lint, _lint.EXAMPLE),
    ("doctor", _doctor.doctor, _doctor.EXAMPLE),
)


class _PlainFlags:
    """Has the help print `--watch`, where typer would print `--watch <bool>`.

    Since 0.26 typer contains its own click, in which a flag is an option of type bool, and its help prints the type of
    each option, or its metavar if it has one. `<bool>` reads as if a value had to follow.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for param in self.get_params(ctx):  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(param, TyperOption) and param.is_flag:
                param.metavar = ""
        super().format_help(ctx, formatter)  # pyright: ignore[reportAttributeAccessIssue]


class _Verb(_PlainFlags, TyperCommand):
    pass


class _Run(_Verb):
    """`run`, whose options end at the script: what follows is the script's."""

    allow_interspersed_args = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_script_options.TYPED] = tuple(args)
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        return [] if ctx.params.get("name") else super().shell_complete(ctx, incomplete)


class _Verbs(_PlainFlags, TyperGroup):
    """Exits with the code that a verb returns, and prints torchguard's errors and OSErrors as a message."""

    def invoke(self, ctx: Any) -> Any:
        try:
            code = super().invoke(ctx)
        except BrokenPipeError:
            raise
        except KeyboardInterrupt:  # files are written as a whole, so there is nothing to clean up
            print_message("torchguard: interrupted.", "yellow")
            code = ExitCode.INTERRUPTED
        except (TorchGuardError, OSError) as error:
            print_message(f"torchguard: {error}", "red")
            code = getattr(error, "exit_code", ExitCode.FAILURE)
        raise typer.Exit(int(code or 0))


app = typer.Typer(
    name="torchguard",
    cls=_Verbs,
    help="Inspect what torch.compile makes of a program: run it, capture what is compiled, analyze and compare it; and "
    "check source code against the coding guidelines.",
    epilog="Exits with 0 if all is well, 1 if it found or hit a problem, 2 for wrong usage, 3 if there is no such "
    "artifact, 130 after Ctrl-C. run exits with the script's code, or with 4 if --strict finds a problem.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _verb, _example in _VERBS:
    app.command(_name, cls=_Run if _name == "run" else _Verb, epilog=f"Examples:\n{_example}")(_verb)


def _print_versions(ctx: typer.Context, is_given: bool) -> None:
    if not is_given or ctx.resilient_parsing:  # which is set while a shell completes
        return
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "is not installed"
    console().print(plain(f"torchguard {__version__}\ntorch {torch}"))
    raise typer.Exit


_Version = Annotated[
    bool,
    typer.Option("--version", callback=_print_versions, is_eager=True, help="Print versions of torchguard and torch."),
]


@app.callback()
def _options(version: _Version = False) -> None: ...


def main() -> NoReturn:
    """Run the command with the arguments of the process, and exit with its code."""
    # Calling the app would install typer's excepthook, which the script would then have.
    command = typer.main.get_command(app)
    try:
        command.main(prog_name="torchguard")
    except _run.Interrupted:
        sys.excepthook = lambda *_: None  # the traceback is already printed
        raise KeyboardInterrupt from None
    raise SystemExit(0)
