"""The pages in a real browser, over a real service that searches on the CPU: from the form to the export.

``make test-browser`` runs these. Pictures are kept in the folder that AUTOTUNE_SCREENSHOTS names.
"""

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import PHONE, WIDE, Tab, open_tab
from test_service_process import Scene

pytestmark = pytest.mark.browser

_SEARCH_MILLISECONDS = 180_000


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("AUTOTUNE_SCREENSHOTS") or tmp_path_factory.mktemp("pictures"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A service that searches on the CPU."""
    with Scene(tmp_path_factory.mktemp("service")) as scene:
        service = scene.serve()
        yield scene
        service.send_signal(signal.SIGTERM)
        assert service.wait(60) == 0


def sign_in(tab: Tab, scene: Scene) -> None:
    """Open the URL that the service printed."""
    tab.page.goto(f"{scene.url}/#token={scene.token}")
    tab.page.get_by_role("heading", name="Search for the fastest configuration").wait_for()
    assert "token" not in tab.page.url


def finished_search(scene: Scene) -> str:
    """Return the id of a search that has finished; one is run where there is none."""
    found = scene.call("GET", "/v1/searches?state=finished")["searches"]
    assert found, "the way from the form to the export comes first"
    return str(found[0]["id"])


def test_the_way_from_the_form_to_the_export(scene: Scene, pictures: Path) -> None:
    with open_tab(scene.url) as tab:
        page = tab.page
        sign_in(tab, scene)
        assert page.get_by_text("No search waits or runs").is_visible()
        page.get_by_label("Model").fill("bert-tiny")
        page.get_by_label("Effective batch").fill("0")
        page.get_by_text("effective batch: '0' is not a whole number").wait_for()
        page.get_by_label("Effective batch").fill("16")
        page.get_by_label("GPU", exact=True).fill("h200")
        page.get_by_text("It will wait: no machine has a GPU named h200").wait_for()
        tab.picture(pictures, "form")
        page.get_by_label("GPU", exact=True).fill("cpu")
        page.get_by_text("More options").click()
        page.get_by_label("Tokens a sample").fill("32")
        page.get_by_label("At most trials").fill("4")
        command = f"autotune search --server {scene.url} --model bert-tiny --effective-batch 16"
        page.locator("#command", has_text=f"{command} --seq-len 32 --device cpu --trials 4").wait_for()
        assert page.locator("#command-note").inner_text() == ""
        page.get_by_role("button", name="Search", exact=True).click()
        page.get_by_role("heading", name="bert-tiny-16").wait_for()
        # What follows comes by events: nothing is loaded anew.
        page.evaluate("() => { window.isTheSamePage = true; }")
        page.get_by_role("heading", name="Best so far").wait_for(timeout=_SEARCH_MILLISECONDS)
        page.locator("#now", has_text="Now: ").wait_for(timeout=_SEARCH_MILLISECONDS)
        page.locator(".full").first.wait_for(timeout=_SEARCH_MILLISECONDS)
        assert tab.problems() == []
        tab.picture(pictures, "running")
        page.get_by_role("heading", name="Best configuration").wait_for(timeout=_SEARCH_MILLISECONDS)
        page.get_by_text("finished", exact=True).wait_for()
        assert page.evaluate("() => window.isTheSamePage")
        # A screen reader is told a little later.
        page.locator("#said", has_text="The search is finished").wait_for(state="attached")
        page.get_by_role("button", name="Copy as JSON").click()
        page.get_by_role("button", name="Copied").wait_for()
        copied = json.loads(page.evaluate("() => navigator.clipboard.readText()"))
        assert copied["per_device_train_batch_size"] * copied["gradient_accumulation_steps"] == 16
        page.get_by_role("link", name="Log of trial").first.click()
        page.get_by_role("dialog").wait_for()
        page.locator("#log").filter(has_not_text="loading …").wait_for()
        assert page.locator("#log").inner_text().strip()
        page.keyboard.press("Escape")
        assert not page.get_by_role("dialog").is_visible()
        assert tab.problems() == []
        tab.picture(pictures, "result")
        assert (tab.complaints, tab.foreign) == ([], [])


@pytest.mark.parametrize(("size", "colours"), [(WIDE, "light"), (WIDE, "dark"), (PHONE, "light"), (PHONE, "dark")],
                         ids=["wide-light", "wide-dark", "phone-light", "phone-dark"])  # fmt: skip
def test_every_page_can_be_read_in_both_themes_and_on_a_phone(
    scene: Scene, pictures: Path, size: tuple[int, int], colours: str
) -> None:
    search = finished_search(scene)
    tag = f"{'phone' if size is PHONE else 'wide'}-{colours}"
    with open_tab(scene.url, size, colours) as tab:
        page = tab.page
        page.goto(f"{scene.url}/compare")
        page.get_by_label("Token").fill("guess")
        page.get_by_role("button", name="Sign in").click()
        page.get_by_text("this token is not known").wait_for()
        assert tab.problems() == []
        # The browser itself tells the console of an answer that is an error.
        assert [text for text in tab.complaints if "401" not in text] == []
        tab.complaints.clear()
        page.goto("about:blank")
        sign_in(tab, scene)
        shown = {
            "home": "/",
            "result": f"/searches/{search}",
            "list": "/searches?sort=took",
            "compare": f"/compare?s={search}",
            "clone": "/?model=bert-tiny&effective_batch=16&fresh=on",
            "nothing": "/searches/nothing",
        }
        for name, path in shown.items():
            page.goto(scene.url + path)
            page.get_by_role("main").wait_for()
            if name == "result":
                page.locator("#lines span").first.wait_for()
            assert tab.problems() == [], name
            tab.picture(pictures, f"{name}-{tag}")
        assert [text for text in tab.complaints if "404" not in text] == []
        assert tab.foreign == []


def test_searches_are_chosen_compared_and_asked_again(scene: Scene, pictures: Path) -> None:
    search = finished_search(scene)
    with open_tab(scene.url) as tab:
        sign_in(tab, scene)
        page = tab.page
        page.get_by_role("link", name="All searches", exact=True).click()
        page.get_by_role("textbox", name="Find").fill("TINY")
        page.keyboard.press("Enter")
        page.get_by_role("link", name="took").click()
        page.get_by_role("checkbox", name="Compare bert-tiny-16").check()
        page.get_by_role("button", name="Compare the chosen ones").click()
        page.get_by_text("nothing is ranked").wait_for()
        page.goto(f"{scene.url}/searches/{search}")
        page.get_by_role("link", name="Clone").click()
        assert page.get_by_label("Effective batch").input_value() == "16"
        assert page.get_by_label("Tokens a sample").input_value() == "32"
        assert tab.problems() == []
        page.go_back()
        page.get_by_role("button", name="Search again").click()
        page.get_by_role("heading", name="bert-tiny-16-2").wait_for()
        page.get_by_role("button", name="Cancel").click()
        page.get_by_text("cancelled", exact=True).wait_for(timeout=_SEARCH_MILLISECONDS)
        assert tab.problems() == []
        tab.picture(pictures, "cancelled")
        assert (tab.complaints, tab.foreign) == ([], [])


def test_the_form_can_be_used_with_the_keyboard_alone(scene: Scene) -> None:
    with open_tab(scene.url) as tab:
        sign_in(tab, scene)
        page = tab.page
        page.evaluate("() => document.body.focus()")
        page.keyboard.press("Tab")
        assert page.evaluate("() => document.activeElement.textContent") == "Skip to the content"
        page.keyboard.press("Enter")
        assert page.evaluate("() => document.activeElement.id") == "main"
        page.keyboard.press("Tab")
        assert page.evaluate("() => document.activeElement.name") == "model"
        page.keyboard.type("bert-tinyy")
        page.keyboard.press("Enter")
        page.get_by_role("alert").get_by_text("bert-tinyy").wait_for()
        assert page.get_by_label("Model").input_value() == "bert-tinyy"
        assert tab.problems() == []


def test_the_optuna_dashboard_shows_a_study_and_leads_back(scene: Scene, pictures: Path) -> None:
    finished_search(scene)
    with open_tab(scene.url) as tab:
        sign_in(tab, scene)
        tab.page.get_by_role("link", name="Optuna dashboard").click()
        tab.page.get_by_text("bert-tiny-16").first.wait_for()
        # What would be refused is not offered.
        assert tab.page.get_by_role("button", name="Reload").is_visible()
        for name in ("Create", "rename study", "delete study"):
            assert not tab.page.get_by_role("button", name=name).is_visible()
        tab.picture(pictures, "dashboard")
        tab.page.get_by_role("link", name="← autotune").click()
        tab.page.get_by_role("heading", name="Search for the fastest configuration").wait_for()
        assert tab.foreign == []


def test_a_connection_that_is_lost_is_said(tmp_path: Path) -> None:
    with Scene(tmp_path) as scene:
        scene.serve()
        with open_tab(scene.url) as tab:
            sign_in(tab, scene)
            assert tab.page.get_by_role("heading", name="Devices").is_visible()
            assert not tab.page.get_by_text("The connection is lost.").is_visible()
            scene.kill()
            tab.page.get_by_text("The connection is lost.").wait_for()
            assert tab.problems() == []
            again = scene.serve_again()
            tab.page.get_by_text("The connection is lost.").wait_for(state="hidden", timeout=60_000)
            again.send_signal(signal.SIGTERM)
            assert again.wait(60) == 0


def test_the_policy_of_the_pages_keeps_other_hosts_out(scene: Scene) -> None:
    with urllib.request.urlopen(f"{scene.url}/", timeout=30) as answer:
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'self'")
    with open_tab(scene.url) as tab:
        sign_in(tab, scene)
        with tab.page.expect_console_message(lambda message: "Content Security Policy" in message.text):
            tab.page.evaluate("() => { const image = new Image(); image.src = 'http://127.0.0.2:1/x'; }")
