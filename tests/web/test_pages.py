"""Every page by use, in a real browser."""

import json
import os
import re
import time
from pathlib import Path

import pytest

from ridgeline import experiments
from ridgeline.jobs.live import announced
from ridgeline.predict import predict
from ridgeline.report.export import load_any
from ridgeline.store import Store
from ridgeline.study import load_study, run_study
from ridgeline.web.app import create_app

ROOT = Path(__file__).parents[2]
AXE = ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js"
SHOTS = os.environ.get("RIDGELINE_SCREENSHOTS")
"""A directory: the documentation's pictures are made by these tests."""


def shot(page, name):
    if SHOTS:
        page.evaluate("() => scrollTo(0, 0)")
        page.screenshot(path=str(Path(SHOTS) / f"{name}.png"))


def settled(page):
    """Wait until the answer to the last change is there."""
    page.wait_for_selector("[data-metric=tokens_per_s]")
    page.wait_for_load_state("networkidle")


def throughput(page):
    return page.locator("[data-metric=tokens_per_s]").inner_text()


def test_a_plan_is_found_from_the_first_page(page):
    """From opening the page to the best plan for a 13B model on eight consumer cards: two clicks."""
    page.goto("/")
    settled(page)
    assert "Does not fit" in page.locator("section[aria-label=Answer]").inner_text()
    page.wait_for_selector("text=What would make it fit")
    shot(page, "plan-does-not-fit")
    page.get_by_role("button", name="Find the best").click()
    page.wait_for_selector("[data-found]")
    page.get_by_role("button", name="use", exact=True).first.click()
    page.wait_for_selector("p.fits")
    settled(page)
    shot(page, "plan")
    assert "with=" in page.url


def test_a_technique_changes_the_numbers_and_a_refused_one_says_why(page):
    page.goto("/#/plan?model=llama2-7b&on=8xa100-80g-sxm&task=pretrain&batch_size=32&with=zero%3Astage%3D2")
    settled(page)
    before = throughput(page)
    page.get_by_label("FlashAttention", exact=False).first.check()
    page.wait_for_function("x => document.querySelector('[data-metric=tokens_per_s]').innerText !== x", arg=before)
    assert "flash_attention" in page.url
    box = page.locator(".technique.refused").first
    assert box.locator("input").is_disabled()
    assert box.locator(".why").inner_text()
    described = box.locator("input").get_attribute("aria-describedby")
    assert page.locator(f"#{described}").inner_text() == box.locator(".why").inner_text()


def test_figures_of_a_card_can_be_dragged(page):
    page.goto("/#/plan?model=llama2-13b&on=8xrtx4090&task=finetune&seq_len=350&batch_size=8&with=zero%3Astage%3D3")
    settled(page)
    before = throughput(page)
    page.get_by_text("change its figures").click()
    slider = page.get_by_label("Link in GB/s")
    slider.focus()
    for _ in range(10):
        page.keyboard.press("ArrowRight")
    page.wait_for_function("x => document.querySelector('[data-metric=tokens_per_s]').innerText !== x", arg=before)
    assert "device=link.bandwidth" in page.url


def test_a_chip_can_be_designed(page):
    page.goto("/#/plan?model=llama2-7b&on=a100-80g-sxm&task=generate&batch_size=8&prompt_len=512&output_len=128")
    settled(page)
    assert page.locator("[data-mm2]").count() == 0
    page.locator("fieldset", has_text="Cluster").locator("select").select_option("chip:ga100")
    page.wait_for_selector("[data-mm2]")
    settled(page)
    before, area = throughput(page), page.locator("[data-mm2]").get_attribute("data-mm2")
    assert page.get_by_label("Nodes", exact=True).count() == 0
    slider = page.get_by_label("Memory stacks")
    slider.focus()
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    page.wait_for_function("x => document.querySelector('[data-metric=tokens_per_s]').innerText !== x", arg=before)
    page.wait_for_function("x => document.querySelector('[data-mm2]').dataset.mm2 !== x", arg=area)
    assert slider.get_attribute("aria-valuetext") == "12"
    assert "device=memory.channels%3D12" in page.url
    # The answers to the steps on the way come first.
    page.wait_for_selector("section[aria-label=Answer] >> text=do not fit on the edge")
    slider.focus()
    for _ in range(6):
        page.keyboard.press("ArrowLeft")
    page.wait_for_function("x => document.querySelector('[data-metric=tokens_per_s]').innerText === x", arg=before)
    page.wait_for_url(lambda url: "device=" not in url)
    shot(page, "chip")


def test_a_link_is_a_copy_of_what_is_seen(page, browser, site):
    page.goto("/")
    settled(page)
    page.get_by_label("Model name").fill("llama2-7b")
    page.keyboard.press("Tab")
    page.get_by_role("radio", name="serve").check(force=True)
    page.wait_for_selector("[data-metric=tpot_p50_s]")
    settled(page)
    other = browser.new_page()
    other.goto(page.url)
    settled(other)
    assert throughput(other) == throughput(page)
    other.close()


def test_a_pasted_config(page):
    page.goto("/")
    settled(page)
    page.get_by_text("Paste a config.json").click()
    config = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 10, "num_attention_heads": 16,
              "intermediate_size": 5632, "vocab_size": 32000, "max_position_embeddings": 2048}  # fmt: skip
    before = throughput(page)
    page.get_by_label("config.json", exact=True).fill(json.dumps(config))
    page.wait_for_function("x => document.querySelector('[data-metric=tokens_per_s]').innerText !== x", arg=before)
    page.get_by_label("config.json", exact=True).fill("{")
    page.wait_for_selector("text=not JSON")


def test_export(page, tmp_path):
    page.goto("/#/plan?model=llama2-7b&on=8xa100-80g-sxm&task=pretrain&with=zero%3Astage%3D2")
    settled(page)
    assert "ridgeline predict llama2-7b --on 8xa100-80g-sxm" in page.locator("pre").first.inner_text()
    with page.expect_download() as download:
        page.get_by_role("link", name="plan.toml").click()
    download.value.save_as(tmp_path / "plan.toml")
    e = experiments.load(tmp_path / "plan.toml")
    assert e.plan.has("zero")


def test_compare(page):
    for on in ("8xa100-80g-sxm", "8xrtx4090"):
        page.goto(f"/#/plan?model=llama2-7b&on={on}&task=pretrain&with=zero%3Astage%3D3")
        page.reload()
        settled(page)
        page.get_by_role("link", name="compare", exact=True).click()
        page.wait_for_selector("text=Differences are highlighted")
    page.wait_for_function("() => document.querySelectorAll('td.differs').length >= 3")
    page.get_by_role("button", name="Cross them").click()
    page.wait_for_selector("[aria-label^='Throughput of pairs'] canvas")
    shot(page, "compare")
    page.get_by_role("button", name="Remove plan 2").click()
    page.wait_for_function("() => document.querySelectorAll('td.differs').length === 0")


def test_runs(page, store):
    run = store.add_ablation(load_any(ROOT / "benchmarks" / "results" / "quickstart.json"))
    e = experiments.make("llama2-7b", "a100-80g-sxm", {"kind": "pretrain"}, ["mixed_precision"], name="shown")
    store.add_result(predict(e))
    page.goto("/#/runs")
    page.wait_for_selector("[data-total]")
    page.get_by_label("Name, model or plan").fill("quick")
    page.wait_for_selector("[data-total='1']")
    assert "name=quick" in page.url
    page.get_by_role("link", name="quickstart").click()
    page.wait_for_selector("[aria-label^='Speed-up'] canvas")
    assert "mixed_precision" in page.content()
    shot(page, "run")
    page.goto("/#/runs")
    page.get_by_label("Name, model or plan").fill("shown")
    page.wait_for_selector("[data-total='1']")
    page.once("dialog", lambda d: d.accept("good, fast"))
    page.get_by_role("button", name=re.compile("Edit tags")).click()
    page.wait_for_selector(".tag >> text=fast")
    page.get_by_role("link", name="shown").click()
    page.wait_for_selector("[aria-label^='Time by phase'] canvas")
    assert run


def test_a_late_answer_does_not_replace_a_later_one(page, store):
    e = experiments.make("llama2-7b", "a100-80g-sxm", {"kind": "pretrain"}, ["mixed_precision"], name="late")
    store.add_result(predict(e))
    store.add_result(predict(e.model_copy(update={"name": "other"})))
    held = []
    page.route(re.compile(r"api/runs\?name=&"), lambda route: held.append(route))
    page.goto("/#/runs")
    page.get_by_label("Name, model or plan").fill("late")
    page.wait_for_selector("[data-total='1']")
    with page.expect_response(re.compile(r"api/runs\?name=&")):
        held[0].continue_()
    page.evaluate("() => new Promise((done) => setTimeout(done, 100))")
    assert page.locator("[data-total]").get_attribute("data-total") == "1"


def test_a_study_shows_its_findings(page, store, tmp_path):
    study = load_study(ROOT / "studies" / "dissecting.toml")
    tables = [t for t in study.tables if t.name == "scaling"]
    findings = [f for f in study.findings if "scale" in f.says.lower() or "scaling" in f.says.lower()]
    few = study.model_copy(update={"tables": tables, "findings": findings})
    key = store.add_study(run_study(few, tmp_path, workers=1))
    page.goto(f"/#/runs?id={key}")
    page.wait_for_selector("text=A800 scales nearly linearly to eight")
    assert page.locator("tbody tr").count() == len(few.findings)


def test_a_running_job_is_followed(page, tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path))
    page.goto("/#/runs")
    with announced("train", "my training", "zero:stage=2", ranks=2, steps=40) as message:
        message({"step": 7, "steps": 40, "loss": 3.25, "tokens": 640, "seconds": 0.5})
        time.sleep(0.6)  # versions of a job's file are half a second apart
        message({"step": 8, "steps": 40, "loss": 3.125, "tokens": 640, "seconds": 0.5})
        job = page.locator("[data-job='my training']")
        job.wait_for()
        page.wait_for_function("() => document.body.innerText.includes('loss 3.1250')")
        assert "8 of 40" in job.inner_text()
        shot(page, "running")
    job.wait_for(state="detached")


def test_ten_thousand_runs(browser, tmp_path):
    from tests.web.conftest import Served

    store = Store(tmp_path / "runs.sqlite")
    e = experiments.make("llama2-7b", "a100-80g-sxm", {"kind": "pretrain"}, [], name="first")
    run = store.add_result(predict(e))
    with store._connect() as db:
        columns = (
            "id, created, kind, source, name, model, plan, tokens_per_s, step_time_s, peak_bytes, status, document"
        )
        row = db.execute(f"SELECT {columns} FROM runs WHERE id = ?", (run,)).fetchone()
        rows = [(f"{i:012x}", f"2026-01-01T{i // 3600:02}:{i // 60 % 60:02}:{i % 60:02}", *row[2:4], f"run {i}",
                 *row[5:7], float(i), *row[8:]) for i in range(10_000)]  # fmt: skip
        db.executemany(f"INSERT INTO runs ({columns}) VALUES ({', '.join('?' * 12)})", rows)
    with Served(create_app(store)) as site:
        page = browser.new_page()
        page.goto(f"{site.url}/#/runs")
        page.wait_for_selector("[data-total='10001']")
        assert page.locator("tbody tr").count() == 100
        page.get_by_role("button", name="Tokens/s").click()
        page.wait_for_function("() => document.querySelector('tbody td a').innerText === 'run 9999'")
        page.get_by_role("button", name="older").click()
        page.wait_for_function("() => document.querySelector('tbody td a').innerText === 'run 9899'")
        page.get_by_label("Name, model or plan").fill("run 4321")
        page.wait_for_selector("[data-total='1']")
        page.close()


def test_catalog(page):
    page.goto("/#/catalog?model=llama2-7b&on=8xa100-80g-sxm&task=finetune")
    page.get_by_label("Find").fill("lora")
    card = page.locator("details.technique", has_text="LoRA lora").first
    card.locator("summary").click()
    card.get_by_role("button", name="Predict it here").click()
    page.wait_for_function("() => document.body.innerText.includes('× the throughput')")
    assert "Claim of the paper" in card.inner_text()
    page.get_by_label("Find").fill("a100")
    page.wait_for_selector("[aria-label^='Rooflines'] canvas")
    shot(page, "catalog")


def test_the_catalog_shows_what_was_measured(page, store):
    run = store.add_ablation(load_any(ROOT / "benchmarks" / "results" / "quickstart.json"))
    page.goto("/#/catalog")
    page.get_by_label("Find").fill("flash_attention")
    page.locator("details.technique summary").first.click()
    link = page.get_by_role("link", name="quickstart").first
    link.wait_for()
    assert f"id={run}" in link.get_attribute("href")


def test_the_playground_says_how_to_start_a_server(page):
    page.goto("/#/playground")
    page.wait_for_selector("text=ridgeline serve CHECKPOINT")


PAGES = ("plan", "compare", "runs", "catalog", "playground")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_pages_are_accessible(browser, site, name, scheme):
    if not AXE.is_file():
        pytest.skip("axe-core is not installed: `npm ci` in web/ brings it")
    page = browser.new_page(color_scheme=scheme, base_url=site.url, bypass_csp=True)
    page.goto(f"/#/{name}")
    page.wait_for_selector("h1")
    page.wait_for_load_state("networkidle")
    page.add_script_tag(path=str(AXE))
    found = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")["violations"]
    serious = [(v["id"], [n["html"] for n in v["nodes"]][:3]) for v in found if v["impact"] in ("serious", "critical")]
    page.close()
    assert not serious


@pytest.mark.parametrize("name", PAGES)
def test_pages_fit_a_phone(browser, site, name):
    page = browser.new_page(base_url=site.url, viewport={"width": 375, "height": 700})
    page.goto(f"/#/{name}")
    page.wait_for_selector("h1")
    page.wait_for_load_state("networkidle")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 375
    page.close()


def test_the_keyboard_is_enough(page):
    page.goto("/")
    settled(page)
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("() => document.activeElement.id") == "main"
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.getAttribute('aria-label')") == "Model name"


def test_nothing_is_loaded_from_elsewhere(page, site):
    asked = []
    page.on("request", lambda r: asked.append(r.url))
    for name in PAGES:
        page.goto(f"/#/{name}")
        page.wait_for_load_state("networkidle")
    assert asked
    assert all(u.startswith((site.url, "data:")) for u in asked)
