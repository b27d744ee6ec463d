"""How long a report with 10,000 steps and 1,000 modules takes to open and to filter, in Debian's chromium.

Half a million of the ten million cells are filled, as in a run in which fifty modules are bad in every step. Figures
are the least of three rounds: seconds on the clock, and seconds of all processes of the browser on the processors,
which hold also while other programs run. The latter have to stay below two.
"""

import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.report.browser import Opened, browser

from torchguard.report import Answer, HeatMap, LineChart, Report, Section, Series, Table

STEPS, MODULES, PER_STEP, LIMIT = 10_000, 1_000, 50, 2.0


def make() -> Report:
    choose = random.Random(0)
    modules = tuple(f"model.layers.{i // 8}.block.{i % 8}" for i in range(MODULES))
    cells = tuple((row, step, 1) for step in range(STEPS) for row in choose.sample(range(MODULES), PER_STEP))
    rows = tuple((step, step % 32, "NAN", modules[step % MODULES]) for step in range(STEPS))
    curve = LineChart(
        "Bad samples", "step", "samples", tuple(range(STEPS)), (Series("bad", (float(PER_STEP),) * STEPS),)
    )
    heat_map = HeatMap("Where", "module", "step", modules, STEPS, cells, "samples")
    table = Table(("step", "sample", "code", "origin"), rows, "Incidents")
    return Report("A long run", (Section("Values", (Answer("bad", "bad"), curve, heat_map, table)),))


class Stopwatch:
    """Seconds on the clock and on the processors since the last reading."""

    def __init__(self, chromium: Any) -> None:
        self._session = chromium.new_browser_cdp_session()
        self._last = self._now()

    def _now(self) -> tuple[float, float]:
        processes = self._session.send("SystemInfo.getProcessInfo")["processInfo"]
        return time.perf_counter(), sum(one["cpuTime"] for one in processes)

    def read(self) -> tuple[float, float]:
        last, self._last = self._last, self._now()
        return self._last[0] - last[0], self._last[1] - last[1]


def measure(path: Path) -> dict[str, tuple[float, float]]:
    """What it takes until the page is ready and its heat map drawn, and until each filter has been applied."""
    with browser() as chromium:
        blank = Report("blank", (Section("blank"),)).save(path.with_name("blank.html"))
        opened = Opened(chromium, blank)  # starts the processes of the browser
        page, figure = opened.page, opened.page.locator("figure.heatmap")
        watch, times = Stopwatch(chromium), {}
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-ready]")
        figure.scroll_into_view_if_needed()
        figure.locator("canvas").first.wait_for()
        times["open"] = watch.read()
        table = page.locator(".table.long").last
        table.scroll_into_view_if_needed()
        page.wait_for_selector("main > section > .table.long[data-ready]")
        times["show the table"] = watch.read()
        for name, field in (("map", figure.locator(".filter")), ("table", table.locator("input"))):
            field.fill("layers.77")
            page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
            times[f"filter the {name}"] = watch.read()
        if opened.messages:
            raise SystemExit(f"the page has errors: {opened.messages}")
        return times


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        path = make().save(Path(folder) / "report.html")
        print(f"made in {time.perf_counter() - start:.1f} s, {path.stat().st_size / 1e6:.1f} MB")
        rounds = [measure(path) for _ in range(3)]
    least = {name: tuple(map(min, zip(*(one[name] for one in rounds), strict=True))) for name in rounds[0]}
    for name, (clock, processors) in least.items():
        print(f"{name}: {clock:.2f} s on the clock, {processors:.2f} s on the processors")
    if max(processors for _, processors in least.values()) > LIMIT:
        raise SystemExit(f"slower than {LIMIT} s")


if __name__ == "__main__":
    main()
