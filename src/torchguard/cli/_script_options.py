"""Options of `torchguard run` that stand behind the script, and so go to the script.

`torchguard run train.py --watch` passes --watch to train.py, as Python would. A script without a parser would then run
to its end unwatched, and nothing would say so. torchguard cannot simply take the option, as the script may have a
--device of its own. So `_script_source` reads the source of the script, and there are three cases:

- the script takes the option: it gets it;
- it does not: the command stops before the script runs, and prints the right order;
- it is unknown: the script gets the option, and a note says why.

A bare `--` before the script passes on everything behind it, and nothing is read.
"""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import typer
from typer.core import TyperOption

from torchguard.cli._script_source import read
from torchguard.cli._terminal import CommandError, ExitCode

# The key of `ctx.meta` for the arguments of `run` as typed. click drops a bare `--` from those it parses.
TYPED = "torchguard.run.typed"


@dataclass(frozen=True)
class Misplaced:
    """An option of `run` among the arguments of a script."""

    name: str  # as it is written, without a value
    words: tuple[str, ...]  # what to write in front of the script
    at: range  # its positions among the arguments


@dataclass(frozen=True)
class Passed:
    """Options of `run` that the script gets, as it takes them or may take them."""

    options: tuple[Misplaced, ...] = ()
    doubt: str = ""  # why it is unknown whether the script takes them
    note: str = ""  # to print before the script runs
    hint: str = ""  # to print if the script exits with 2, as parsers do for an unknown option


def check(context: typer.Context, script: str, arguments: Sequence[str], as_module: bool) -> Passed:
    """Find the options of `run` that the script gets.

    Raises:
        CommandError: the script does not take one of them.
    """
    front = context.meta[TYPED][: -1 - len(arguments)]
    found = () if front[-1:] == ("--",) else misplaced(context.command.params, arguments)
    if not found:
        return Passed()
    source = read(script, as_module)
    taken = {one: source.takes(one.name) if source else True for one in found}
    if refused := [one for one in found if taken[one] is False]:
        raise CommandError(
            f"run: options behind {script} go to the script, which does not take {_names(refused)}. "
            f"Put options of torchguard in front:\n  {moved_to_front(front, script, arguments, refused)}\n"
            f"If the script does take {_names(refused)}:\n"
            f"  {shlex.join(['torchguard', 'run', *front, '--', script, *arguments])}",
            ExitCode.USAGE,
        )
    unknown = tuple(one for one in found if taken[one] is None)
    options = unknown or found
    doubt = source.doubt(unknown[0].name) if source and unknown else ""
    order = f"Put options of torchguard in front:\n  {moved_to_front(front, script, arguments, options)}"
    unsure = f"It is unknown whether it takes {_names(unknown)}: {doubt}. {order}"
    note = f"torchguard: options behind {script} go to the script. {unsure}" if doubt else ""
    return Passed(options, doubt, note, f"torchguard: {script} exited with 2, and was given {_names(options)}. {order}")


def misplaced(params: Iterable[object], arguments: Sequence[str]) -> tuple[Misplaced, ...]:
    """The options of `run` among the arguments of a script, up to a bare `--`."""
    known = {
        spelling: param
        for param in params
        # -m says what SCRIPT is: behind a script, it is never meant for torchguard.
        if isinstance(param, TyperOption) and param.name != "as_module"
        for spelling in (*param.opts, *param.secondary_opts)
    }
    found: list[Misplaced] = []
    last = arguments.index("--") if "--" in arguments else len(arguments)
    for position in range(last):
        name, equals, _ = arguments[position].partition("=")
        is_value = bool(found) and position in found[-1].at
        if name in known and not is_value and (not equals or name.startswith("--")):
            found.append(_with_value(known[name], name, arguments[position:last], position))
    return tuple(found)


def _with_value(param: TyperOption, name: str, words: Sequence[str], position: int) -> Misplaced:
    """The option that `words` start with, and its value."""
    if param.is_flag or "=" in words[0]:
        return Misplaced(name, (name if param.is_flag else words[0],), range(position, position + 1))
    has_value = len(words) > 1 and not words[1].startswith("-")
    value = words[1] if has_value else param.name.upper()  # a placeholder
    return Misplaced(name, (name, value), range(position, position + 1 + has_value))


def moved_to_front(front: Sequence[str], script: str, arguments: Sequence[str], moved: Sequence[Misplaced]) -> str:
    """The command line with some of the arguments in front of the script."""
    gone = {position for one in moved for position in one.at}
    left = [word for position, word in enumerate(arguments) if position not in gone]
    return shlex.join(["torchguard", "run", *(word for one in moved for word in one.words), *front, script, *left])


def _names(options: Iterable[Misplaced]) -> str:
    return " and ".join(dict.fromkeys(one.name for one in options))
