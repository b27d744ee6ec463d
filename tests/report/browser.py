"""Debian's chromium, driven by playwright."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

_OPTIONS = "--no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update"


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A headless browser with a profile of its own."""
    program = shutil.which("chromium")
    assert program, "chromium is missing: apt-get install chromium"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=[*_OPTIONS.split(), "--disable-sync"])
        yield opened
        opened.close()


class Opened:
    """An opened report: the page, what it wrote to the console, and what it asked the network for."""

    def __init__(self, browser: Any, path: Path, *, scheme: Any = "light", width: int = 1360) -> None:
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page: Page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page.on("console", lambda message: self.messages.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.messages.append(f"error: {error}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("body[data-ready]")

    def see_all(self) -> None:
        """Scroll through the page, so that every chart is drawn."""
        for figure in self.page.locator("figure.chart").all():
            if figure.is_visible():
                figure.scroll_into_view_if_needed()
                figure.locator("canvas").first.wait_for()
