"""A headless browser for the tests of the live page."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT_S = 180


class Page(HTMLParser):
    """Text and attributes of a page as a browser has drawn it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.rows: list[list[str]] = []  # of its tables, by cell
        self._in_cell = False
        self._attributes: list[tuple[str, str | None]] = []
        self.feed(re.sub(r"<(script|style)>.*?</\1>", "", html, flags=re.S))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._attributes += attrs
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._in_cell &= tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.text += f" {data.strip()}"
        if self._in_cell:
            self.rows[-1][-1] += data.strip()

    def values(self, attribute: str) -> list[str | None]:
        """Return the values of an attribute in the order of the page."""
        return [value for name, value in self._attributes if name == attribute]


def find_browser() -> str | None:
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def browse(browser: str, url: str, profile: Path) -> Page:
    """Open a page and read what its script has drawn. The profile is the browser's own folder."""
    shown = subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu"),
            *("--disable-background-networking", f"--user-data-dir={profile}"),
            # virtual time stands still while the page waits for an answer
            *("--virtual-time-budget=300", "--dump-dom", url),
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert shown.returncode == 0, shown.stderr
    return Page(shown.stdout)
