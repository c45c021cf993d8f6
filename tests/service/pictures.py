"""Take the pictures of the service's pages that the documentation shows.

``python tests/service/pictures.py docs/images`` starts a service over two searches that were recorded on an H200, with
stand-ins for its devices, and photographs its pages in the system's Chromium.
"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "studies")]

from browsing import PHONE, open_tab  # noqa: E402
from served import Service  # noqa: E402
from serving import record_answers  # noqa: E402
from standing_in import with_devices  # noqa: E402

LARGE = {"model": "bert-large-uncased", "effective_batch": 64, "memory_limit": "23.5GiB"}
IN_FP32 = {**LARGE, "precision": ["fp32"], "study": "bert-large-uncased-64-fp32"}
WIDE = (1000, 860)


def photograph(service: Service, folder: Path) -> None:
    """Save a picture of each page that the documentation shows."""
    result = f"{service.url}/searches/bert-large-uncased-64"
    comparison = f"{service.url}/compare?s=bert-large-uncased-64&s=bert-large-uncased-64-fp32"
    with open_tab(service.url, WIDE) as tab:
        tab.page.goto(f"{service.url}/#token={service.token}")
        for label, text in {"Model": "bert-large-uncased", "Effective batch": "64", "GPU": "b200"}.items():
            tab.page.get_by_label(label, exact=True).fill(text)
        tab.page.get_by_text("It will wait: no machine has").wait_for()
        tab.page.locator("h1").click()
        tab.picture(folder, "service-form-light")
        tab.page.goto(comparison)
        tab.picture(folder, "service-compare-light")
    with open_tab(service.url, (1000, 1080), "dark") as tab:
        tab.page.goto(f"{service.url}/#token={service.token}")
        tab.page.get_by_role("main").wait_for()
        tab.page.goto(result)
        tab.picture(folder, "service-result-dark", whole=False)
    with open_tab(service.url, PHONE) as tab:
        tab.page.goto(f"{service.url}/#token={service.token}")
        tab.page.get_by_role("main").wait_for()
        tab.page.goto(result)
        tab.picture(folder, "service-phone-light", whole=False)


def main() -> None:
    """Take the pictures into the folder that was named."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        token = record_answers(f"{place}/a.db", LARGE, IN_FP32)
        with Service(Path(place), with_devices(Path(place), {"gpu-1": 1, "gpu-2": 1})) as service:
            service.token = token
            service.serve("--storage", "a.db")
            # One runs, and others wait.
            for asked in (
                {"model": "gpt2-medium", "effective_batch": 32, "device": "h200"},
                {"model": "roberta-large", "effective_batch": 64, "gpus": 2},
            ):
                service.call("POST", "/v1/searches", asked)
            photograph(service, folder)


if __name__ == "__main__":
    main()
