"""A real Chromium for tests of the pages: it notes what a page complains of, and what it asks of other hosts."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_WAIT_MILLISECONDS = 20_000
CHECKS = Path(__file__).with_name("accessibility.js")
WIDE, PHONE = (1200, 900), (360, 780)


@dataclass
class Tab:
    """A page in a browser of its own."""

    page: Any
    service: str
    complaints: list[str] = field(default_factory=list)
    """What went to the console as an error or a warning, and exceptions of scripts."""
    foreign: list[str] = field(default_factory=list)
    """What was asked of another host."""

    def watch(self) -> None:
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._see)

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.text} ({message.location.get('url', '')})")

    def _see(self, request: Any) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob", "about") and f"{parts.scheme}://{parts.netloc}" != self.service:
            self.foreign.append(request.url)

    def picture(self, folder: Path, name: str, *, whole: bool = True) -> None:
        self.page.screenshot(path=str(folder / f"{name}.png"), full_page=whole, animations="disabled")

    def problems(self) -> list[str]:
        """Return what someone with a screen reader, a keyboard or weak eyes would stumble over."""
        # The style sheets, too.
        self.page.wait_for_load_state("load")
        return self.page.evaluate(CHECKS.read_text())


@contextmanager
def open_tab(service: str, size: tuple[int, int] = WIDE, colours: str = "light") -> Iterator[Tab]:
    """Open a browser with a profile of its own; skips the test where there is no browser."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(_ARGUMENTS), timeout=60_000)
        try:
            context = browser.new_context(
                viewport={"width": size[0], "height": size[1]},
                color_scheme=colours,
                permissions=["clipboard-read", "clipboard-write"],
                has_touch=size is PHONE,
                device_scale_factor=1,
            )
            page = context.new_page()
            page.set_default_timeout(_WAIT_MILLISECONDS)
            tab = Tab(page, service)
            tab.watch()
            yield tab
        finally:
            browser.close()
