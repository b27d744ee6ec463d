"""The tables of README and docs say what the results of the benchmarks say."""

import json
import runpy
from pathlib import Path

import pytest
import torch

import torchguard
from torchguard.distributed import _digest

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


def test_the_messages_of_the_simulated_ranks_are_those_of_a_digest():
    f = torchguard.err.new_t(2)
    found = json.loads((TABLES["RESULTS"] / "ranks.json").read_text())["digest"]
    for ranks, one in found.items():
        parts = [_digest._counts(f), *[_digest._bits(torch.tensor(0))] * 2]
        parts.append(_digest._powers(torch.tensor(0), 0, int(ranks)))
        assert one["bytes"] == 8 * sum(map(len, parts))
        assert one["gathered, bytes"] == int(ranks) * 8 * (len(_digest._counts(f)) + 3)
