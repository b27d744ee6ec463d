"""Reports as data, text and HTML."""

import base64
import json
import math
import re
from array import array

import pytest
from tests.report.hostile import EVIL, hostile_report

from torchguard._sizes import format_size
from torchguard.report import Answer, HeatMap, LineChart, Report, ReportError, Section, Series, Shown, Table, Text
from torchguard.report._html import _heat_map_data
from torchguard.report._text import bars


def test_a_report_is_read_back_from_its_json():
    report = hostile_report()
    assert Report.from_json(report.to_json()) == report


def test_json_has_a_version_and_no_numbers_that_json_lacks():
    table = Table(("loss",), ((math.nan,), (math.inf,)))
    chart = LineChart("loss", "step", "loss", (0, 1), (Series("loss", (math.nan, 1.0)),))
    data = json.loads(Report("r", (Section("s", (table, chart)),)).to_json(), parse_constant=pytest.fail)
    assert data["schema"] == 1
    table, chart = data["sections"][0]["blocks"]
    assert table["rows"] == [["NaN"], ["Inf"]]
    assert chart["series"][0]["values"] == [None, 1.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(marker="x"), "marker"),
        (lambda data: data.update(schema=99), "schema 99, expected 1"),
        (lambda data: data.update(title=3), "report.title: expected str, got 3"),
        (lambda data: data["sections"][0].pop("title"), r"report.sections\[0\].title is missing"),
        (lambda data: data["sections"][0]["blocks"][0].update(kind="x"), r"blocks\[0\].kind: expected one of answer"),
        (lambda data: data["sections"][0]["blocks"][0].update(status="x"), "status: expected one of ok"),
        (lambda data: data["sections"][0].update(blocks=3), "blocks: expected an array"),
    ],
)
def test_json_that_is_no_report_is_refused_with_the_path_of_what_is_wrong(change, message):
    data = Report("r", (Section("s", (Answer("ok", "fine"),)),)).to_dict()
    change(data)
    with pytest.raises(ReportError, match=message):
        Report.from_dict(data)


def test_text_has_the_answers_and_no_control_characters():
    text = hostile_report().to_text(width=120)
    assert "\x1b" not in text
    assert "Samples went bad at" in text
    assert "In the HTML page: Incident" in text


def test_the_status_of_a_section_is_that_of_its_worst_answer():
    inner = Section("b", (Answer("bad", "x"), Answer("ok", "y")))
    assert Report("r", (Section("a", (Answer("unknown", "z"),), (inner,)),)).status == "bad"
    assert Section("c", (Text("nothing"),)).status == "ok"


def test_text_in_a_page_is_escaped():
    page = hostile_report().to_html()
    scripts = re.findall(r"<script[^>]*>", page)
    assert {*scripts} == {"<script>", '<script type="application/json" class="data">'}
    assert scripts.count("<script>") == 2  # the library and the page's own
    assert "<img" not in page.partition("Apache Software")[0]
    assert "49" not in page.partition("<title>")[2][:300]  # no text is a template


def test_a_page_forbids_the_network_and_other_scripts():
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', hostile_report().to_html())[1]
    assert "default-src &#39;none&#39;" in policy
    scripts = re.search(r"script-src ([^;]*(?:&#39;[^;]*)*);\s*style", policy)[1]
    assert scripts.count("sha256-") == 2
    assert "unsafe" not in scripts


def test_a_page_without_charts_does_without_the_library():
    page = Report("r", (Section("s", (Text("nothing"),)),)).to_html()
    assert len(page) < 60_000


def test_a_notebook_gets_tables_in_place_of_charts_and_no_script():
    html = hostile_report()._repr_html_()
    assert "<script" not in html.replace(EVIL, "")
    assert "<img" not in html
    assert "steps with any" in html  # the table of the heat map


def test_results_show_themselves_and_save_by_suffix(tmp_path):
    class Result(Shown):
        def section(self):
            return Section("Result", (Answer("ok", "all is well"),))

    assert "all is well" in Result()._repr_html_()
    assert "<!doctype html>" in Result().save(tmp_path / "a.html").read_text()
    assert Report.from_json(Result().save(tmp_path / "a.json").read_text()).title == "Result"
    assert "all is well" in Result().save(tmp_path / "a.txt").read_text()
    with pytest.raises(ReportError, match=r"has to end in one of \.html"):
        Result().save(tmp_path / "a.pdf")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.html", "a.json", "a.txt"]


def test_columns_of_a_large_heat_map_are_joined_and_nothing_is_lost():
    rows, columns = 500, 2_000
    cells = tuple((row, column, 1) for row in range(rows) for column in range(columns) if (row + column) % 3)
    data = _heat_map_data(HeatMap("t", "module", "step", tuple(map(str, range(rows))), columns, cells))
    assert data["join"] == 4
    values = array({8: "B", 16: "H", 32: "I"}[data["values"]["bits"]])
    values.frombytes(base64.b64decode(data["values"]["data"]))
    assert sum(values) == len(cells)
    assert len(values) <= 250_000


def test_a_bar_chart_has_its_peak_at_the_top_and_its_width_is_limited():
    assert bars([0, 1024, 2048, 0], width=4, height=2, label=format_size) == ["   2.0 KiB |  █", "       0 B | ██"]
    assert all(len(row) <= 72 for row in bars(range(5000)))
    assert bars([]) == ["(nothing)"]
    assert bars([1024, 2048], width=2, height=1, ascii_only=True, label=format_size) == ["   2.0 KiB |##"]
