"""The HTML page in a real browser."""

import pytest
from tests.report.browser import Opened, browser
from tests.report.hostile import EVIL, hostile_report

from torchguard.report import Code, HeatMap, LineChart, Pane, Report, Section, Series, Table

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def chromium():
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return hostile_report().save(tmp_path_factory.mktemp("report") / "report.html")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_hostile_text_runs_nothing_loads_nothing_and_shows_as_it_is(chromium, path, scheme):
    opened = Opened(chromium, path, scheme=scheme)
    opened.page.goto(path.as_uri() + "#incident")
    opened.see_all()
    for canvas in opened.page.locator(".canvas").all():  # tooltips show text, too
        canvas.focus()
        canvas.press("ArrowRight")
    assert opened.messages == []
    assert {one.partition("#")[0] for one in opened.requests} == {path.as_uri()}
    assert opened.page.evaluate("window.hacked") is None
    assert opened.page.title().replace("\u2028", " ").startswith("</script></details><script>")
    assert opened.page.locator("figure.heatmap figcaption").text_content() == EVIL


def test_a_script_that_is_not_the_pages_own_is_refused(chromium, path):
    opened = Opened(chromium, path)
    run = "const s = document.createElement('script'); s.textContent = 'window.hacked = 1'; document.body.append(s)"
    opened.page.evaluate(run)
    opened.page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hacked=1\">')")
    assert opened.page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in one for one in opened.messages)


def test_tables_are_filtered_sorted_and_paged(chromium, path):
    page = Opened(chromium, path).page
    table = page.locator(".table.long").nth(0)
    table.scroll_into_view_if_needed()
    page.wait_for_selector(".table.long[data-ready]")
    rows = table.locator("tbody tr")
    assert rows.count() == 50
    table.locator("button.next").click()
    assert rows.count() == 10
    table.locator("input").fill("\x1b[31m{{7*7}} 59")
    assert rows.count() == 1
    assert "1 of 60 rows" in table.locator(".count").text_content()
    table.locator("input").fill("")
    table.locator("th button").first.click()
    table.locator("th button").first.click()
    assert rows.first.locator("td").first.text_content() == "59"
    assert table.locator("th").first.get_attribute("aria-sort") == "descending"


def test_a_heat_map_is_filtered_and_shows_counts_on_hover_and_by_keys(chromium, tmp_path):
    rows = tuple(f"layer.{i}" for i in range(100))
    heat_map = HeatMap("Where", "module", "step", rows, 1_000, tuple((i, 10 * i, i + 1) for i in range(100)), "samples")
    page = Opened(chromium, Report("r", (Section("s", (heat_map,)),)).save(tmp_path / "r.html")).page
    figure = page.locator("figure.heatmap")
    figure.locator("canvas").first.wait_for()
    count = figure.locator("> .tools .count")
    assert "100 of 100 rows, page 1 of 3" in count.text_content()
    figure.locator(".filter").fill("LAYER.77")
    assert "1 of 100 rows" in count.text_content()
    canvas = figure.locator(".canvas")
    canvas.focus()
    canvas.press("ArrowRight")
    assert figure.locator(".spoken").text_content() == "layer.77, steps 770 to 774: 78 samples"
    figure.locator(".from").fill("760")
    figure.locator(".to").fill("780")
    figure.locator(".to").press("Enter")
    canvas.focus()
    canvas.press("End")
    assert figure.locator(".spoken").text_content() == "layer.77, step 770: 78 samples"
    canvas.press("Escape")
    figure.locator(".filter").focus()
    box = canvas.bounding_box()
    tip = page.locator(".tip")
    for x in range(int(box["width"] / 3), int(box["width"]), 4):  # until the mouse finds the one cell
        page.mouse.move(box["x"] + x, box["y"] + 17)
        if tip.count() and tip.is_visible():
            break
    assert tip.text_content() == "layer.77step 77078 samples"


def test_links_open_collapsed_sections_and_listings_follow_each_other(chromium, path):
    page = Opened(chromium, path).page
    assert not page.locator("#incident").evaluate("one => one.open")
    page.locator(".table.long a").first.click()
    assert page.locator("#incident").evaluate("one => one.open")
    page.locator(".code li[data-key]").first.hover()
    assert page.locator(".code li.same").count() == 2


def test_all_can_be_reached_by_keys_and_has_a_name(chromium, path):
    page = Opened(chromium, path).page
    for _ in range(120):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('.roofline summary')"):
            break
    else:
        pytest.fail("Tab does not reach the last control")
    unnamed = """[...document.querySelectorAll('button, input, [tabindex="0"]')].filter(
        one => !(one.textContent.trim() || one.getAttribute('aria-label') || one.closest('label'))).length"""
    assert page.evaluate(unnamed) == 0
    assert (
        page.evaluate("document.querySelectorAll('figure.chart').length")
        == page.locator("figure .behind table").count()
    )


def test_the_theme_can_be_chosen_and_print_is_light_with_everything_open(chromium, path):
    opened = Opened(chromium, path, scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = opened.page.evaluate(ground)
    opened.page.locator("#theme").click()
    assert opened.page.evaluate(ground) == "rgb(255, 255, 255)" != dark
    opened.page.locator("#theme").click()
    opened.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert opened.page.locator("#incident").evaluate("one => one.open")
    charts = opened.page.locator("figure.chart").count()
    assert opened.page.locator("figure.chart canvas.printed").count() == charts >= 5  # one image each
    opened.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert opened.page.locator("canvas.printed").count() == 0
    assert opened.page.evaluate(ground) == dark
    assert opened.messages == []


def test_print_has_the_heat_map_all_rows_and_only_listings_that_are_open(chromium, tmp_path):
    rows = Table(("a",), tuple((f"row {i}",) for i in range(700)), total=900)
    cells = HeatMap("Where", "module", "step", ("layer",), 1, ((0, 0, 1),), "samples")
    listing = Section("Graph", (Code("c", (Pane("p", ("x = 1",)),)),), collapsed=True)
    opened = Opened(chromium, Report("r", (Section("s", (cells, rows)), listing)).save(tmp_path / "r.html"))
    more = opened.page.locator(".table.long > .more").last
    opened.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    image = opened.page.locator("figure.heatmap canvas.printed")
    assert image.evaluate("one => one.getContext('2d').getImageData(900, 20, 1, 1).data[0]") > 150  # the cell is red
    assert opened.page.locator(".table.long tbody tr").last.text_content() == "row 499"
    assert more.text_content() == "… and 400 more rows, which are not printed."
    assert not opened.page.locator("details.section").evaluate("one => one.open")
    opened.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert opened.page.locator(".table.long tbody tr").last.text_content() == "row 49"
    assert more.text_content() == "… and 200 more rows, which are not in this page."


def test_a_page_reads_without_scripts(chromium, tmp_path):
    table = Table(("a",), tuple((f"row {i}",) for i in range(60)))
    path = Report("r", (Section("s", (table,)), *hostile_report().sections)).save(tmp_path / "r.html")
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(path.as_uri())
    assert page.get_by_text("row 49").is_visible()
    assert "10 more rows, which need a browser with scripts" in page.locator(".more").first.text_content()
    context.close()


def test_a_narrow_window_does_not_scroll_sideways(chromium, path):
    opened = Opened(chromium, path, width=400)
    opened.see_all()
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 400


def test_print_has_the_range_that_was_chosen_and_no_slider(chromium, tmp_path):
    curve = LineChart("Memory", "step", "bytes", tuple(range(100)), (Series("live", tuple(map(float, range(100)))),))
    page = Opened(chromium, Report("r", (Section("s", (curve,)),)).save(tmp_path / "r.html")).page
    chart = "echarts.getInstanceByDom(document.querySelector('.canvas'))"
    page.evaluate(f"{chart}.dispatchAction({{ type: 'dataZoom', start: 25, end: 75 }})")
    zoom = f"(({{ start, end, show }}) => [start, end, show])({chart}.getOption().dataZoom[0])"
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(zoom) == [25, 75, False]
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(zoom) == [25, 75, True]
