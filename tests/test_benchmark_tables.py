"""The tables of README and docs say what the results of the benchmarks say."""

import runpy
from pathlib import Path

import pytest

TABLES = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "tables.py"))


@pytest.mark.parametrize("path", TABLES["PAGES"], ids=lambda path: path.name)
def test_tables_are_those_of_the_results(path):
    page = path.read_text()
    assert "<!-- table: " in page
    assert page == TABLES["with_tables"](page)


def test_the_worst_row_comes_first():
    _, _, *rows = TABLES["costs"]().splitlines()
    quarantine = [float(row.split("|")[2].split("/")[1]) for row in rows]
    assert quarantine == sorted(quarantine, reverse=True)
