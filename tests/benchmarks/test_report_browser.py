"""The page in a browser: no sideways scrolling, no errors, light and dark. Without Chromium it is skipped."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.command_line import main
from tests.benchmarks.made_up import make_results

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = ("quic", "background-networking", "component-update", "sync", "gpu")

# Looks at the page at both widths through frames, before and after the button, and leaves what it saw in its own text.
LOOK = """<!doctype html><html><body>
<iframe id="phone" src="page.html" style="width:390px;height:844px;border:0"></iframe>
<iframe id="desk" src="page.html" style="width:1280px;height:900px;border:0"></iframe>
<script>
window.onload = function () {
  var seen = {};
  ["phone", "desk"].forEach(function (name) {
    var page = document.getElementById(name).contentDocument, root = page.documentElement;
    var view = page.defaultView, shade = function (what) { return view.getComputedStyle(what).backgroundColor; };
    var first = page.querySelector("svg"), box = page.querySelector(".scroll");
    var before = shade(page.body), ink = view.getComputedStyle(first).fill;
    page.getElementById("theme").click();
    seen[name] = {
      width: root.clientWidth, needed: root.scrollWidth, figures: page.querySelectorAll("svg").length,
      smallest: Math.min.apply(null, Array.from(page.querySelectorAll("svg text")).map(function (word) {
        return word.getBoundingClientRect().height; })),
      wide: box.scrollWidth, box: box.clientWidth, right: box.getBoundingClientRect().right,
      before: before, after: shade(page.body), ink: ink, inkAfter: view.getComputedStyle(first).fill
    };
    page.getElementById("theme").click();
  });
  document.body.textContent = "SEEN" + JSON.stringify(seen) + "SEEN";
};
</script></body></html>"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")]


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder and says nothing."""

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("results")
    make_results(folder)
    assert main(["report", "--results", str(folder), "--output", str(folder / "page.html")]) == 0
    (folder / "look.html").write_text(LOOK)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/look.html"
    server.shutdown()
    thread.join()


def look(address: str, folder, *, dark: bool) -> tuple[dict, list[str]]:
    """Return what the frames saw, and what the console said."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in QUIET)]
    command += [f"--user-data-dir={folder}", "--enable-logging=stderr", "--v=0", "--virtual-time-budget=20000"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom", address]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    seen = re.search("SEEN(.*)SEEN", finished.stdout)
    assert seen, finished.stderr[-2000:]
    return json.loads(seen.group(1)), [line for line in finished.stderr.splitlines() if ":CONSOLE" in line]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_fits_a_phone_and_a_desk_in_both_themes(address, tmp_path, dark):
    seen, console = look(address, tmp_path, dark=dark)
    assert console == []
    for name, width in (("phone", 390), ("desk", 1280)):
        page = seen[name]
        assert width - 20 <= page["width"] <= width
        assert page["needed"] <= page["width"]
        assert page["right"] <= page["width"]
        assert page["figures"] > 10
        assert page["smallest"] >= 7  # pixels of the smallest text of a figure, on the phone too
        light, other = ("after", "before") if dark else ("before", "after")
        assert page[light] == "rgb(255, 255, 255)"
        assert page[other] == "rgb(22, 22, 21)"
        assert page["ink"] != page["inkAfter"]
    assert seen["phone"]["wide"] > seen["phone"]["box"]  # a wide table scrolls in its box
