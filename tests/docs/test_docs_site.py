"""Test that the documentation builds without warnings or foreign requests, and that the README stays short."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from checkout import ROOT
from pages import DOCS, README, blocks, pages

# Elements that a browser loads by itself, with the attribute that says from where.
_LOADED = {"link": "href", "script": "src", "img": "src", "source": "srcset", "iframe": "src", "video": "src"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the built site; a dead link or a missing page is an error of the build."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    shutil.copytree(DOCS, folder / "docs")
    words = [sys.executable, "-m", "zensical", "build", "--strict"]
    ended = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder / "site"


class _Addresses(HTMLParser):
    """Collects what a page loads, and where its pictures are."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in _LOADED and (address := values.get(_LOADED[tag])) and values.get("rel") != "canonical":
            self.found.append(address)


def addresses_loaded_by(page: Path) -> list[str]:
    """Return the addresses that a browser loads with a page."""
    parser = _Addresses()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser.found


def test_no_page_asks_another_host(site: Path) -> None:
    built = sorted(site.rglob("*.html"))
    assert len(built) >= len(list(DOCS.rglob("*.md")))
    foreign = {address for page in built for address in addresses_loaded_by(page) if re.match(r"(https?:)?//", address)}
    assert not foreign


def test_every_picture_is_there(site: Path) -> None:
    """The strict build looks at links alone."""
    for page in site.rglob("index.html"):
        for address in addresses_loaded_by(page):
            if not address.startswith(("data:", "http")):
                assert (page.parent / address.split("#")[0].split("?")[0]).exists(), (page, address)


def test_every_page_is_in_the_navigation() -> None:
    named = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(named) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


def links(page: Path) -> Iterator[str]:
    """Yield the relative links of a Markdown file, code aside."""
    text = re.sub(r"^```.*?^```$|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", text):
        address = "".join(target)
        if not address.startswith(("http", "mailto:")):
            yield address


def headings(page: Path) -> set[str]:
    """Return the anchors of a Markdown file's headings."""
    found = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", title.lower()).strip().replace(" ", "-") for title in found}


def test_links_lead_somewhere_without_the_site() -> None:
    for page in [*pages(), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        for address in links(page):
            path, _, anchor = address.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), (page.name, address)
            if anchor and target.suffix == ".md":
                assert anchor in headings(target), (page.name, address)


def test_the_readme_is_short() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 90
    assert len(text.split()) <= 800


def test_the_transcript_of_the_readme_was_recorded() -> None:
    """Its lines are those of a recorded run, in order; it is replaced by a new run, not by hand."""
    _, printed = blocks(README.read_text(encoding="utf-8"), "console")[1].split("\n", 1)
    recorded = ROOT / "studies" / "runs" / "bert-base_h200_texts_search.txt"
    lines = iter(recorded.read_text(encoding="utf-8").splitlines())
    assert len(printed.splitlines()) == 7
    assert all(line in lines for line in printed.splitlines())
