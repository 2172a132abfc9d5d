"""What the documentation links and names exists, and its numbers come from the code and from results."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path
from statistics import fmean, median

import pytest
import typer
from tests.compress.test_driver import COMPRESSED, DENSELY
from tests.graph.conftest import FAMILIES as GRAPHS
from tests.nn.conftest import CONFIGS, PAIRS
from tests.serve.test_engine import SERVED
from tests.train.test_families import CONFIGS as TRAINED
from tests.validate.test_never_fitted import CLASSES as NEVER_FITTED
from tests.validate.test_never_fitted import predicted

from ridgeline import catalog, experiments
from ridgeline.cli.base import app
from ridgeline.docs.__main__ import pages
from ridgeline.docs.effects import Effects
from ridgeline.docs.measured import from_ablation, from_compression, from_rows
from ridgeline.predict import predict
from ridgeline.report.units import metric, size, times
from ridgeline.spec.families import FAMILIES as READERS
from ridgeline.techniques.registry import registry

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
GENERATED = {"architecture.md", "catalogue.md", "hardware-figures.md", "prediction-cards.md"}
STUDIED = {f"studies/{name}.md" for name in ("dissecting", "survey", "systems")}


def anchors(page: Path) -> set[str]:
    """The fragments that a page's headings can be linked with."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", t.lower()).strip().replace(" ", "-") for t in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, fragment = target.partition("#")
        if "://" in target or name in GENERATED | STUDIED:
            continue
        found = (page.parent / name) if name else page
        assert found.exists(), f"{page.name}: {target}"
        assert not fragment or fragment in anchors(found), f"{page.name}: {target}"


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r": (\S+\.md)", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert listed - GENERATED == {p.name for p in (ROOT / "docs").glob("*.md")} - GENERATED


def test_the_planned_example_fits():
    e = experiments.load(ROOT / "examples" / "llama2-70b-64xa100.toml")
    assert e.cluster.size == 64
    assert predict(e).status == "ok"


def test_the_api_reference_names_what_is_there():
    named = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.M)
    assert len(named) == len(set(named)) > 20
    for name in named:
        module, _, attribute = name.rpartition(".")
        assert pkgutil.resolve_name(f"{module}:{attribute}").__doc__, name


def test_studies_are_pages():
    made = pages()
    assert set(made) >= STUDIED
    page = made["studies/systems.md"]()
    assert all(name in page.replace("\\_", "_") for name in catalog.systems())


def test_every_class_of_devices_has_a_prediction_card():
    cards = pages()["prediction-cards.md"]()
    for name in catalog.devices():
        (card,) = (part for part in cards.split("\n## ") if f"`{name}`" in part.splitlines()[2])
        device = catalog.device(name)
        if name == "dfx-u280":  # on three published rates of one model
            assert "The constants were fitted on `dfx-u280`." in card
            continue
        fitted = bool(catalog.efficiency(device).fitted_on)
        assert ("held-out shapes" in card) == fitted
        assert ("every constant is assumed" in card) == (not fitted)
        judged = any(row.device == name for table, *_ in NEVER_FITTED.values() for row in table)
        assert ("No measurement of this class was at hand" in card) <= (not fitted and not judged)
        assert not judged or "on which no figure was fitted" in card


@pytest.mark.parametrize("kind", NEVER_FITTED)
def test_cards_have_the_errors_on_what_was_never_fitted(kind):
    table, *_ = NEVER_FITTED[kind]
    errors = [abs(predicted(row).seconds / row.seconds - 1) for row in table]
    (architecture,) = {catalog.device(row.device).architecture for row in table}
    cards = pages()["prediction-cards.md"]()
    (card,) = (part for part in cards.split("\n## ") if part.startswith(f"{architecture}\n"))
    rows = re.findall(rf"\| {len(table)} rows \| ([\d.]+) % \(([\d.]+)\)", card)
    found = [(float(middle) / 100, float(mean) / 100) for middle, mean in rows]
    assert any(pair == pytest.approx((median(errors), fmean(errors)), abs=0.001) for pair in found)


def test_the_card_of_blackwell_has_its_runs():
    cards = pages()["prediction-cards.md"]()
    (card,) = (part for part in cards.split("\n## ") if part.startswith("blackwell\n"))
    assert re.search(r"^\| Llama 3 .* in fp8 .*B200.* \| 5 runs \| mean [\d.]+ % \|$", card, re.M)
    assert "No training run" not in card


def test_cards_say_which_engines_were_judged_on_the_class():
    cards = {part.partition("\n")[0]: part for part in pages()["prediction-cards.md"]().split("\n## ")}
    assert re.search(
        r"^\| `vllm`, loads \| `h100-sxm` \| [\d]+ % \(\d+\), 102 rows \|.*\| fitted to .*H100", cards["hopper"], re.M
    )
    assert re.search(r"^\| `mlc`, fixed batches \| `a10g` \| – \| .*, 4 rows \| gap_s: .* A100", cards["ampere"], re.M)
    assert "No generation or serving on this class" in cards["ada"]


# ---- a page per technique -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def effects():
    return Effects(ROOT)


def test_every_technique_has_a_page_that_the_catalog_links():
    made = pages()
    assert {f"techniques/{name}.md" for name in registry()} == {n for n in made if n.startswith("techniques/")}
    index = made["catalogue.md"]()
    assert all(f"](techniques/{name}.md)" in index for name in registry())


def test_a_page_has_claim_prediction_measurement_and_options(effects):
    page = pages()["techniques/lora.md"]()
    assert registry()["lora"].card.claim in page
    assert all(f"| {e.source} | {e.setting} | {e.says} |" in page for e in effects.of("lora"))
    assert all(f"| `{option}` |" in page for option in registry()["lora"].model_fields)


def test_effects_name_what_is_there(effects):
    known = set(registry())
    data = effects.data
    assert {x["technique"] for x in data["claim"] + data["measured"]} | set(data["options"]) | set(
        data["instead"]
    ) <= known
    for setting in data["setting"].values():
        experiments.make(setting["model"], setting["on"], dict(setting["workload"]), setting["beside"])
    for c in data["claim"]:
        experiments.make(c["model"], c["on"], dict(c["workload"]), c["plan"])
        assert c["technique"] in {call.partition(":")[0] for call in c["plan"]}


@pytest.mark.parametrize("name", sorted({m["technique"] for m in Effects(ROOT).data["measured"]}))
def test_measured_effects_are_read(effects, name):
    rows = list(effects._measured(name))
    wanted = [m for m in effects.data["measured"] if m["technique"] == name]
    assert len(rows) >= len(wanted)
    for m in wanted:
        assert any(m["file"] in r.setting and r.says.endswith(m["says"]) for r in rows)


def test_a_part_of_a_file_may_have_an_environment_of_its_own(effects):
    data = effects._files["beyond_memory.json"]
    of = [e.setting for e in effects._measured("kv_offload") if "beyond_memory.json" in e.setting]
    assert data["prefix"]["environment"]["code"] != data["environment"]["code"]
    assert of
    assert all(data["prefix"]["environment"]["code"] in setting for setting in of)


def test_a_prediction_on_a_page_is_the_prediction(effects):
    """With against without, beside the techniques that the row names."""
    (row,) = [e for e in effects.of("recompute") if e.source == "predicted"]
    s = effects.data["setting"]["train"]
    a, b = (predict(experiments.make(s["model"], s["on"], dict(s["workload"]), plan))
            for plan in (s["beside"], [*s["beside"], "recompute"]))  # fmt: skip
    old, new = (r.metrics["tokens_per_s"] for r in (a, b))
    assert f"{times(new.value / old.value)} tokens/s ({metric(old.value, old.unit)} → " in row.says
    assert f"({size(a.peak_bytes)} → {size(b.peak_bytes)})" in row.says
    assert all(f"`{call}`" in row.setting for call in (*s["beside"], "recompute"))


def test_what_was_not_measured_is_said(effects):
    quiet = next(n for n in registry() if not list(effects._measured(n)))
    assert effects.of(quiet)[-1].says == "not measured"


def test_results_are_found_by_their_plans():
    rows = {"model": "m", "rows": [
        {"method": name, "plan": plan, "step_s": {"measured": t, "predicted": 2.0}, "held_out_loss": {"after": 3.0},
         "peak_bytes": {"measured": m, "predicted": m}}
        for name, plan, t, m in (("plain", [], 1.0, 100), ("small", ["lora:rank=4"], 0.5, 40),
                                 ("both", ["lora:rank=4", "recompute"], 0.75, 10))
    ]}  # fmt: skip
    ((setting, says),) = from_rows(rows, "lora")
    assert (setting, says.split("<br>")[0]) == ("small against plain, m", "0.500× step time (predicted 1.00×)")
    ((setting, says),) = from_rows(rows, "recompute")
    assert (setting, says.split("<br>")[1]) == ("both against small, m", "0.250× peak (predicted 0.250×)")
    part = {"rows": {"x": {"plan": ["wanda"], "against_dense": {"value": 1.1, "low": 1.05, "high": 1.2},
                           "bits_per_weight": 16.0}}}  # fmt: skip
    assert list(from_compression({"dense_part": part}, "wanda")) == [
        ("perplexity, dense part", "`wanda`: +10.00 % [+5.00, +20.00], 16.00 bits per weight")
    ]
    assert not list(from_compression({"dense_part": part}, "awq"))
    assert not list(from_ablation(rows, "lora"))


def test_the_feature_list_names_every_technique():
    text = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
    table = text.partition("## Techniques")[2].partition("\n## ")[0]
    assert {n for n in re.findall(r"`(\w+)`", table) if n in registry()} == set(registry())
    assert f"| **Techniques** | {len(registry())}," in text
    assert f"{len(catalog.models())} models" in text
    assert f"{len(catalog.devices())} devices" in text
    assert f" {len(registry())} techniques " in (ROOT / "README.md").read_text(encoding="utf-8")


def commands():
    """(page, words) of every ``ridgeline …`` line in a block of code."""
    for page in PAGES:
        for block in re.findall(r"^```(?:bash|console)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
            for line in block.replace("\\\n", " ").splitlines():
                words = line.removeprefix("$ ").partition(" #")[0].split()
                if words[:1] == ["ridgeline"] and "|" not in words:
                    yield page.name, words[1:]


def test_commands_in_the_documentation_exist_with_their_options():
    known = typer.main.get_command(app).commands
    seen = 0
    for page, (name, *words) in commands():
        assert name in known, f"{page}: ridgeline {name}"
        command = known[name]
        if hasattr(command, "commands"):  # a group, such as `fleet`
            name, command = f"{name} {words[0]}", command.commands.get(words.pop(0))
            assert command is not None, f"{page}: ridgeline {name}"
        options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
        used = {w.partition("=")[0] for last, w in zip(["", *words], words, strict=False)
                if re.match(r"--?[a-z]", w) and last != "--with"}  # fmt: skip
        assert used <= options, f"{page}: ridgeline {name}: {sorted(used - options)}"
        seen += 1
    assert seen > 50


def _covered(families, covered):
    """A cell of the table of families: a tick where all of a row are tested, else those that are."""
    found = [f for f in families if f in covered]
    return "✓" if found == families else ", ".join(f"`{f}`" for f in found) or "no"


def test_the_table_of_families_is_what_the_tests_cover():
    def kinds(configs):
        return {config["model_type"] for config in configs.values()}

    text = (ROOT / "docs" / "adding-a-family.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:3] == "| `"]
    packed = kinds(COMPRESSED) - set(DENSELY)
    listed = []
    for name, _, _, files, flops, trains, served, compressed in rows:
        families = re.findall(r"`(\w+)`", name.partition("(")[0])
        listed += families
        assert files == _covered(families, kinds(CONFIGS) | kinds(PAIRS)), name
        assert flops == _covered(families, kinds(GRAPHS)), name
        assert trains == _covered(families, kinds(TRAINED) | kinds(PAIRS)), name
        assert served == ("embeddings" if families == ["bert"] else _covered(families, kinds(SERVED))), name
        assert compressed == ("densely" if set(families) <= set(DENSELY) else _covered(families, packed)), name
    assert sorted(listed) == sorted(READERS)
