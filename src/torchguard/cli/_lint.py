"""`torchguard lint`."""

import difflib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from torchguard import __version__
from torchguard.cli._terminal import (
    CommandError,
    ExitCode,
    console,
    plain,
    plural,
    print_json,
    print_message,
    safe,
    stderr,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchguard.lint import Finding, LintResult

EXAMPLE = """
torchguard lint src

torchguard lint --select TG1,TG201 --output-format github src tests

torchguard lint --fix src
"""


class Format(StrEnum):
    TEXT = "text"
    JSON = "json"
    SARIF = "sarif"
    GITHUB = "github"


_Codes = typer.Option(metavar="CODES", help="Codes or their beginnings, separated by commas; TG for every rule.")


def lint(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Files and directories.", show_default="the directory")
    ] = None,
    select: Annotated[list[str] | None, _Codes] = None,
    ignore: Annotated[list[str] | None, typer.Option(metavar="CODES", help="Rules to leave out.")] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Apply the fixes that are safe.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Print what --fix would change, and change nothing.")] = False,
    output_format: Annotated[Format, typer.Option(help="How to print the findings.")] = Format.TEXT,
    statistics: Annotated[bool, typer.Option("--statistics", help="Print how often each rule is broken.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Number of processes.", show_default="all cores")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Neither read nor write the cache.")] = False,
) -> int:
    """Check Python files against the coding guidelines, without running them.

    Exits with 0 if there are no findings, with 1 if there are, and with 2 for a wrong option, path or setting.
    """
    from torchguard.lint import LintError, check_paths
    from torchguard.lint._files import default_cache

    given = paths or [Path()]
    chosen, left_out = _codes(select), _codes(ignore) or []
    try:
        if fix or diff:
            changed = _fix(given, chosen, left_out, is_written=fix and not diff)
            if diff:
                return ExitCode.FAILURE if changed else ExitCode.OK
        with _progress() as progress:
            result = check_paths(
                given,
                select=chosen,
                ignore=left_out,
                jobs=jobs,
                cache=None if no_cache else default_cache(),
                progress=progress,
            )
    except LintError as error:
        raise CommandError(f"lint: {error}", ExitCode.USAGE) from error
    if not result.files:
        print_message("There are no Python files in these paths.", "yellow")
    _print(result, output_format, statistics)
    return ExitCode.FAILURE if result.findings else ExitCode.OK


def _codes(given: list[str] | None) -> list[str] | None:
    if given is None:
        return None
    return [code.strip() for one in given for code in one.split(",") if code.strip()]


def _print(result: "LintResult", output_format: Format, statistics: bool) -> None:
    from torchguard.lint import _formats

    findings = result.findings
    if statistics:
        counts = _formats.statistics(findings)
        if output_format is Format.JSON:
            print_json(counts)
        else:
            for one in counts:
                console().print(plain(f"{one['count']:>6}  {one['code']}  {one['name']}"))
    elif output_format is Format.JSON:
        print_json([finding.to_data() for finding in findings])
    elif output_format is Format.SARIF:
        sys.stdout.write(_formats.as_sarif(findings, __version__) + "\n")
    elif output_format is Format.GITHUB:
        if findings:
            sys.stdout.write(_formats.as_github(findings) + "\n")
    else:
        _print_text(findings)
        if not findings:
            console().print(plain(f"No findings in {plural(len(result.files), 'file')}."))
        else:
            console().print(plain(f"{plural(len(findings), 'finding')} in {plural(len(result.files), 'file')}."))


def _print_text(findings: list["Finding"]) -> None:
    if not sys.stdout.isatty():
        sys.stdout.write("".join(f"{safe(finding)}\n" for finding in findings))
        return
    screen = console()
    for one in findings:
        line = plain(f"{one.file}:{one.line}:{one.column}: ", "bold")
        screen.print(line + plain(one.code, "red") + plain(f" {one.message}"), soft_wrap=True)


def _fix(paths: list[Path], select: list[str] | None, ignore: list[str], *, is_written: bool) -> int:
    """Fix every file, or print the difference; the number of fixes."""
    from torchguard.lint import _files, _fixes
    from torchguard.lint._config import settings_for

    _fixes.require_libcst()
    total = files = 0

    def settings_of(file: str):
        return settings_for(Path(file).absolute().parent).with_options(select, ignore)

    settings_of(".")
    for file in dict.fromkeys(_files.find_files(paths, settings_of)):
        content = _files.read(file)
        source = _decoded(content) if isinstance(content, bytes) else None
        if source is None:
            continue  # which the check reports
        fixed, count = _fixes.fix_source(source, settings_of(file).codes_for(file))
        if not count:
            continue
        total, files = total + count, files + 1
        if is_written:
            Path(file).write_bytes(fixed.encode("utf-8"))
        else:
            lines = difflib.unified_diff(source.splitlines(True), fixed.splitlines(True), file, file)
            sys.stdout.write("".join(safe(line.rstrip("\n")) + "\n" for line in lines))
    if is_written or total:
        done = "Fixed" if is_written else "Would fix"
        print_message(f"{done} {plural(total, 'finding')} in {plural(files, 'file')}.")
    return total


def _decoded(content: bytes) -> str | None:
    """UTF-8 text, with its line ends as they are. Files in other encodings are not fixed."""
    if content.startswith(b"\xef\xbb\xbf") or b"\0" in content or b"\x0c" in content:
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return None


@contextmanager
def _progress() -> Iterator["Callable[[int, int], None] | None"]:
    """A bar on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("checking"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr(), transient=True) as bar:
        task = bar.add_task("checking", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
