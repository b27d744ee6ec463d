"""Output to a terminal and to a file."""

import os
import pty
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchguard.cli._terminal import CommandError, console, one_line, parse_age, safe, table


@given(st.text())
def test_no_text_can_control_the_terminal(text):
    escaped = safe(text)
    assert all(character in "\n\t" or character.isprintable() or not _is_control(character) for character in escaped)


def _is_control(character):
    code = ord(character)
    return code < 0x20 or 0x7F <= code < 0xA0 or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069


@given(st.text())
def test_one_line_has_no_line_break_and_a_limit(text):
    assert len(one_line(text).splitlines()) <= 1
    assert len(one_line(text, 10)) <= 13


def test_tables_are_plain_in_a_file_and_never_cut(tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    with (tmp_path / "out").open("w") as file:
        console(file).print(table(("NAME", "COUNT"), [("x" * 300, 1), ("[red]y[/red]", 22)], right=("COUNT",)))
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines[1].split() == ["x" * 300, "1"]
    assert lines[2].split() == ["[red]y[/red]", "22"]


@pytest.mark.parametrize(
    ("verb", "usage", "says"),
    [
        ("analyze", "analyze [OPTIONS] [TARGET] ", "the newest artifact"),
        ("show", "show [OPTIONS] [ID] ", "the newest"),
        ("run", "SCRIPT} [ARGS]... ", "Its arguments"),
    ],
    ids=["analyze", "show", "run"],
)
def test_help_says_how_a_verb_is_used(invoke, monkeypatch, verb, usage, says):
    monkeypatch.setenv("COLUMNS", "200")
    output = invoke(verb, "--help").stdout
    assert usage in output
    assert says in output


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("1.5h", 5400), ("7d", 604800), (" 2 W ", 1209600)])
def test_ages_are_parsed(text, seconds):
    assert parse_age(text).total_seconds() == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "1y", "nan d", "1e3d"])
def test_text_that_is_not_an_age_is_refused(text):
    with pytest.raises(CommandError, match="is not an age"):
        parse_age(text)


def test_an_age_beyond_all_dates_is_limited_to_100_years():
    assert parse_age("9" * 30 + "w").days == 36_500


@pytest.mark.parametrize(
    ("environment", "has_colour"),
    [({}, True), pytest.param({"NO_COLOR": "1"}, False, marks=pytest.mark.long)],
    ids=["colour", "NO_COLOR"],
)
def test_on_a_terminal_of_80_columns_nothing_is_wider(captured, environment, has_colour):
    terminal, child = pty.openpty()
    os.set_blocking(terminal, False)
    variables = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    arguments = [sys.executable, "-m", "torchguard", "show", "--dir", captured.root]
    ran = subprocess.run(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=child,
        stderr=subprocess.DEVNULL,
        env={**variables, "TERM": "xterm-256color", "COLUMNS": "80", **environment},
        check=False,
    )
    output = os.read(terminal, 1 << 20).decode()
    os.close(terminal)
    os.close(child)
    assert ran.returncode == 0
    assert ("\x1b[3" in output) == has_colour
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in output.splitlines()) <= 80
