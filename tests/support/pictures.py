"""Pictures of a plan's report for the documentation: ``make pictures``, or in `tests/` ``python -m support.pictures plan.json
../docs/pictures``. It needs Chromium (``apt-get install -y chromium``)."""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path

from autopar.ir.plan_file.plan_file import load_plan
from autopar.report.page import report_page
from support.harness.browser import Browser

WIDTH = 1000
PICTURES = {
    "why": ("header", "header"),
    "seconds": ("#step", "#step"),
    "memory": ("#memory", "#memory"),
    "search": ("#search", "#search"),
    "cluster": ("#cluster", "#cluster"),
    "what_if": ("#whatif", "#whatif"),
}
"""The first and the last part of the page that a picture shows."""

LARGEST_BYTES = 200_000
_BOX = """(() => {
    const [first, last] = FIRST_AND_LAST.map((each) => document.querySelector(each).getBoundingClientRect());
    return [scrollY + first.top, scrollY + last.bottom];
})()"""


def draw(plan: Path, folder: Path) -> None:
    """Write the pictures. AssertionError where one is too large for the documentation."""
    folder.mkdir(parents=True, exist_ok=True)
    browser = Browser()
    try:
        with tempfile.TemporaryDirectory() as aside:
            page = Path(aside) / "report.html"
            page.write_text(report_page(load_plan(plan)))
            browser.show(page, WIDTH, dark=False)
            for name, parts in PICTURES.items():
                top, bottom = browser.value(_BOX.replace("FIRST_AND_LAST", str(list(parts))))
                clip = {"x": 0, "y": top, "width": WIDTH, "height": bottom - top, "scale": 1}
                shot = browser.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
                content = base64.b64decode(shot["data"])
                assert len(content) <= LARGEST_BYTES, f"{name} has {len(content)} bytes"
                (folder / f"{name}.png").write_bytes(content)
    finally:
        browser.close()


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
