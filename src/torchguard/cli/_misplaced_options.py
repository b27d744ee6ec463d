"""Options of `torchguard run` that stand behind the script, and so go to the script.

`torchguard run train.py --watch` gives --watch to train.py, as python would. A script without a parser then runs to its
end unwatched, and nothing says so. Options behind the script cannot simply be taken from it: it may have a --device of
its own. So `script_options` reads the script's source. What it does not take stops the command before the script runs;
where that cannot be told, the script is given the option and a note says so. A bare `--` before the script passes
everything to it unread.
"""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import typer
from typer.core import TyperOption

from torchguard.cli import _script_options
from torchguard.cli._terminal import CommandError, ExitCode

# Where the command keeps its arguments as they were typed: click drops a bare `--`.
TYPED = "torchguard.run.typed"


@dataclass(frozen=True)
class Misplaced:
    """An option of `run` among the arguments of a script."""

    name: str  # as it is written, without a value
    words: tuple[str, ...]  # what to write in front of the script
    at: range  # where it stands among the arguments


@dataclass(frozen=True)
class CommandLine:
    """What was typed behind `torchguard run`."""

    options: tuple[str, ...]
    script: str
    arguments: tuple[str, ...]
    is_verbatim: bool  # a bare `--` stands before the script

    @classmethod
    def of(cls, typed: Sequence[str], script: str, arguments: Sequence[str]) -> "CommandLine":
        options = tuple(typed[: len(typed) - 1 - len(arguments)])
        is_verbatim = options[-1:] == ("--",)
        return cls(options[:-1] if is_verbatim else options, script, tuple(arguments), is_verbatim)

    def with_in_front(self, moved: Sequence[Misplaced]) -> str:
        gone = {position for one in moved for position in one.at}
        left = [word for position, word in enumerate(self.arguments) if position not in gone]
        front = [word for one in moved for word in one.words]
        return shlex.join(["torchguard", "run", *front, *self.options, self.script, *left])

    def passed_verbatim(self) -> str:
        return shlex.join(["torchguard", "run", *self.options, "--", self.script, *self.arguments])


@dataclass(frozen=True)
class LetThrough:
    """Options of `run` that the script is given all the same: it takes them, or this cannot be told."""

    line: CommandLine
    options: tuple[Misplaced, ...]
    doubt: str = ""

    @property
    def note(self) -> str:
        """To be said before the script runs; empty where it takes them."""
        return self.doubt and (
            f"torchguard: options behind {self.line.script} go to the script. Whether it takes {_names(self.options)} "
            f"cannot be told: {self.doubt}. {self._right_order}"
        )

    @property
    def hint(self) -> str:
        """To be said if the script ends with 2, as a parser ends that does not know an option."""
        given = _names(self.options)
        return given and f"torchguard: {self.line.script} ended with 2, and was given {given}. {self._right_order}"

    @property
    def _right_order(self) -> str:
        return f"What is meant for torchguard goes in front of it:\n  {self.line.with_in_front(self.options)}"


def check(context: typer.Context, script: str, arguments: Sequence[str], as_module: bool) -> LetThrough:
    """Which options of `run` the script is given.

    Raises:
        CommandError: the script does not take one of them.
    """
    line = CommandLine.of(context.meta[TYPED], script, arguments)
    found = () if line.is_verbatim else misplaced(context.command.params, arguments)
    source = _script_options.read(script, as_module) if found else None
    if source is None:
        return LetThrough(line, found)
    answers = {one: source.takes(one.name) for one in found}
    if refused := [one for one, answer in answers.items() if answer.is_taken is False]:
        raise CommandError(_refusal(line, refused), ExitCode.USAGE)
    doubtful = {one: answer.why for one, answer in answers.items() if answer.is_taken is None}
    return LetThrough(line, tuple(doubtful) or found, next(iter(doubtful.values()), ""))


def misplaced(params: Iterable[object], arguments: Sequence[str]) -> tuple[Misplaced, ...]:
    """The options among the arguments of a script, up to a bare `--`."""
    known = {
        spelling: param
        for param in params
        # -m says what SCRIPT is: behind a script, it was never meant for torchguard.
        if isinstance(param, TyperOption) and param.name != "as_module"
        for spelling in (*param.opts, *param.secondary_opts)
    }
    found: list[Misplaced] = []
    last = arguments.index("--") if "--" in arguments else len(arguments)
    for position in range(last):
        name, equals, _ = arguments[position].partition("=")
        is_value = bool(found) and position in found[-1].at
        if name in known and not is_value and (not equals or name.startswith("--")):
            found.append(_moved(known[name], name, arguments[position:last], position))
    return tuple(found)


def _moved(param: TyperOption, name: str, words: Sequence[str], position: int) -> Misplaced:
    """The option that `words` start with, and its value."""
    alone = range(position, position + 1)
    if param.is_flag:
        return Misplaced(name, (name,), alone)
    if "=" in words[0]:
        return Misplaced(name, (words[0],), alone)
    if len(words) == 1 or words[1].startswith("-"):  # no value was given, and a line to be copied needs one
        return Misplaced(name, (name, param.name.upper()), alone)
    return Misplaced(name, (name, words[1]), range(position, position + 2))


def _names(options: Sequence[Misplaced]) -> str:
    return " and ".join(dict.fromkeys(one.name for one in options))


def _refusal(line: CommandLine, refused: Sequence[Misplaced]) -> str:
    return (
        f"run: options behind {line.script} go to the script, which does not take {_names(refused)}. "
        f"Put what is meant for torchguard in front:\n  {line.with_in_front(refused)}\n"
        f"If the script does take {_names(refused)}:\n  {line.passed_verbatim()}"
    )
