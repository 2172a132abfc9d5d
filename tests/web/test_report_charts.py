"""The figures of HTML reports, drawn in a real browser."""

from pathlib import Path

from ridgeline.report.export import load_any
from ridgeline.report.html import ablation_html

ROOT = Path(__file__).parents[2]


def test_every_figure_is_drawn(browser, tmp_path):
    path = ablation_html(load_any(ROOT / "benchmarks" / "results" / "quickstart.json"), tmp_path / "report.html")
    assert path.stat().st_size < 1e6
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme)
        trouble = []
        page.on("pageerror", lambda e, t=trouble: t.append(str(e)))
        page.on("console", lambda m, t=trouble: t.append(m.text) if m.type in ("error", "warning") else None)
        page.goto(path.as_uri())
        figures = page.locator("[data-chart]").count()
        page.wait_for_function("n => document.querySelectorAll('[data-chart] canvas').length === n", arg=figures)
        # A drawn canvas has more than one color.
        blank = page.evaluate("""() => [...document.querySelectorAll("[data-chart] canvas")].filter((c) => {
            const pixels = new Uint32Array(c.getContext("2d").getImageData(0, 0, c.width, c.height).data.buffer);
            return new Set(pixels).size < 8;
        }).length""")
        page.close()
        assert figures > 8
        assert blank == 0
        assert not trouble


def test_a_tooltip_says_name_and_number(browser, tmp_path):
    path = ablation_html(load_any(ROOT / "benchmarks" / "results" / "quickstart.json"), tmp_path / "report.html")
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.goto(path.as_uri())
    box = page.locator("[data-chart=speedup]")
    box.locator("canvas").wait_for()
    box.scroll_into_view_if_needed()
    at = box.bounding_box()
    page.mouse.move(at["x"] + 0.35 * at["width"], at["y"] + 0.24 * at["height"])
    page.wait_for_function("() => document.body.innerText.includes('× measured')")
    page.close()
