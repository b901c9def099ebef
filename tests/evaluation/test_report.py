"""The report, as a real browser shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from aha.evaluation.evaluate import evaluate

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --allow-file-access-from-files --virtual-time-budget=4000"
).split()

# What a reader does, by events; what comes of it, as JSON in the page.
ACTIONS = """
<script>
addEventListener("load", () => {
  const $ = (s, e = document) => e.querySelector(s), $$ = (s, e = document) => [...e.querySelectorAll(s)];
  const seen = {};
  const map = $("button.stack .map"), slider = $("#strength");
  slider.value = 20; slider.dispatchEvent(new Event("input"));
  seen.opacity = getComputedStyle(map).opacity;
  seen.output = $("output").value;
  seen.light = getComputedStyle(document.body).backgroundColor;
  $("#theme").click();
  seen.dark = getComputedStyle(document.body).backgroundColor;
  $("#differences").click();
  seen.differences = getComputedStyle($("td .diff")).display + " " + getComputedStyle($("td .value")).display;
  const chip = $$(".chip")[1];
  chip.click();
  seen.hidden = $$('.cell[data-explainer="1"]').every((e) => getComputedStyle(e).display === "none");
  seen.pressed = chip.getAttribute("aria-pressed");
  chip.click();
  $("button.stack").click();
  const dialog = $("dialog"), name = () => $("figcaption", dialog).textContent.trim().split(/\\s/)[0];
  seen.open = dialog.open; seen.first = name();
  const press = (key) => dialog.dispatchEvent(new KeyboardEvent("keydown", { key }));
  press("ArrowRight"); seen.second = name(); press("ArrowLeft"); seen.back = name();
  dialog.close();
  seen.loaded = $$("img.map").filter((i) => i.loading !== "lazy" || i.complete).length;
  seen.curves = $$("path.line").every((p) => p.getTotalLength() > 10);
  seen.focusable = $$("button, input, [tabindex='0'], summary").every((e) => e.tabIndex >= 0);
  const wide = $$("body *").filter((e) => !e.closest(".scroll, .chips, dialog, pre, svg") &&
    e.getBoundingClientRect().right > document.documentElement.clientWidth + 1);
  seen.wide = wide.map((e) => e.tagName + "." + e.className);
  const fetched = performance.getEntriesByType("resource").map((r) => r.name);
  seen.requests = fetched.filter((name) => !name.startsWith("data:"));
  const pre = document.createElement("pre"); pre.id = "seen"; pre.textContent = JSON.stringify(seen);
  document.body.append(pre);
});
</script>
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, classifier_options) -> Path:
    from aha.evaluation.evaluate import EvaluateOptions

    output = tmp_path_factory.mktemp("report")
    evaluate(
        EvaluateOptions(
            explainers="centre_prior,random,object_mask,a<b>&=random(grid=4)",
            output=str(output),
            protocols="aha(fractions=[0,0.25,0.5,0.75,1]),perturbation(fractions=[0,0.5])",
            classifier=classifier_options,
            limit=20,
            device="cpu",
        )
    )
    return output / "report.html"


def browse(page: Path, tmp_path: Path) -> str:
    """The page's document after its scripts ran."""
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.addresses, self.stack = [], []

    def handle_starttag(self, tag, attributes):
        self.addresses += [v for k, v in attributes if k in ("src", "href", "srcset", "action", "poster")]
        if tag not in ("meta", "link", "img", "br", "wbr", "input", "path", "circle"):
            self.stack.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("path", "circle"):
            assert self.stack.pop() == tag


def test_one_file_that_needs_nothing_else(report: Path) -> None:
    text = report.read_text()
    reader = Reader()
    reader.feed(text)
    assert reader.stack == [] and reader.addresses
    assert all(address.startswith("data:") for address in reader.addresses)
    assert not re.search(r"url\((?!data:)|@import|https?://(?!www\.w3\.org)", text)
    assert "a&lt;b&gt;&amp;" in text and "a<b>" not in text  # names are text, never markup
    for word in ("Best", "Median", "Worst", "Most disagreement", "Hard samples", "lower is better ↓"):
        assert word in text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
def test_a_reader_can_use_it(report: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(report.read_text().replace("</body>", f"{ACTIONS}</body>"))
    seen = json.loads(
        re.search(r'<pre id="seen">(.*?)</pre>', browse(page, tmp_path), re.DOTALL)[1].replace("&gt;", ">")
    )
    assert seen["opacity"] == "0.2" and seen["output"] == "20 %"
    assert seen["light"] != seen["dark"]
    assert seen["differences"] == "inline none"
    assert seen["hidden"] and seen["pressed"] == "false"
    assert seen["open"] and (seen["first"], seen["second"], seen["back"]) == ("centre_prior", "random", "centre_prior")
    assert seen["curves"] and seen["focusable"]
    assert seen["wide"] == [] and seen["requests"] == []


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
def test_on_a_phone_nothing_sticks_out(report: Path, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(report.read_text().replace("</body>", f"{ACTIONS}</body>"))
    frame = tmp_path / "phone.html"
    frame.write_text(
        '<iframe src="report.html" style="width:390px;height:800px;border:0"></iframe><script>addEventListener("load", '
        '() => setTimeout(() => document.body.append(document.querySelector("iframe").contentDocument'
        '.getElementById("seen")), 500))</script>'
    )
    seen = json.loads(
        re.search(r'<pre id="seen">(.*?)</pre>', browse(frame, tmp_path), re.DOTALL)[1].replace("&gt;", ">")
    )
    assert seen["wide"] == [] and seen["opacity"] == "0.2"
