"""The command `torchguard`. Nothing here loads torch: a verb does, when it needs it."""

import importlib.metadata
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from torchguard import __version__
from torchguard.cli import _analyze, _clean, _diff, _doctor, _misplaced_options, _run, _show
from torchguard.cli import _list as listing
from torchguard.cli._terminal import ExitCode, console, plain, say
from torchguard.exceptions import TorchGuardError

__all__ = ["app", "main"]

_VERBS = (
    ("run", _run.run, _run.EXAMPLE),
    ("list", listing.list_artifacts, listing.EXAMPLE),
    ("show", _show.show, _show.EXAMPLE),
    ("diff", _diff.diff, _diff.EXAMPLE),
    ("clean", _clean.clean, _clean.EXAMPLE),
    ("analyze", _analyze.analyze, _analyze.EXAMPLE),
    ("doctor", _doctor.doctor, _doctor.EXAMPLE),
)


def _hide_types_of_flags(command: TyperCommand | TyperGroup, ctx: Any) -> None:
    """Have the help show `--watch` as `--watch`.

    typer brings a click of its own since 0.26, in which a flag is an option of the type bool, and its help shows each
    option with its type, or with its metavar if it has one: `--watch <bool>`, which reads as if a value had to follow.
    """
    for param in command.get_params(ctx):
        if isinstance(param, TyperOption) and param.is_flag:
            param.metavar = ""


class _Verb(TyperCommand):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        _hide_types_of_flags(self, ctx)
        super().format_help(ctx, formatter)


class _Run(_Verb):
    """Behind the script, options are the script's."""

    allow_interspersed_args = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_misplaced_options.TYPED] = tuple(args)
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        return [] if ctx.params.get("name") else super().shell_complete(ctx, incomplete)


class _Verbs(TyperGroup):
    """Ends with what a verb returns, and says an error of torchguard's in a sentence."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _hide_types_of_flags(self, ctx)
        super().format_help(ctx, formatter)

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
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _verb, _example in _VERBS:
    app.command(_name, cls=_Run if _name == "run" else _Verb, epilog=f"Examples:\n{_example}")(_verb)


def _show_versions(ctx: typer.Context, is_asked: bool) -> None:
    if not is_asked or ctx.resilient_parsing:  # the latter while a shell completes
        return
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "is not installed"
    console().print(plain(f"torchguard {__version__}\ntorch {torch}"))
    raise typer.Exit


_Version = Annotated[
    bool,
    typer.Option("--version", callback=_show_versions, is_eager=True, help="Show torchguard's version and torch's."),
]


@app.callback()
def _options(version: _Version = False) -> None: ...


def main() -> NoReturn:
    # The command itself, and not the app, which would set an excepthook that the script had to live with.
    command = typer.main.get_command(app)
    try:
        command.main(prog_name="torchguard")
    except _run.Interrupted:
        sys.excepthook = lambda *_: None  # its traceback was shown
        raise KeyboardInterrupt from None
    raise SystemExit(0)
