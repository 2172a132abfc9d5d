"""Sweeps over designs: limits, front, verdicts, files."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ridgeline import catalog, experiments
from ridgeline.catalog import chips
from ridgeline.cli.base import app
from ridgeline.hardware.area import edge_mm, total_mm2
from ridgeline.hardware.device import chip_device
from ridgeline.predict import predict
from ridgeline.search import design_tables
from ridgeline.search.design_space import read_space
from ridgeline.search.designs import non_dominated, on_design, sweep
from ridgeline.search.found import ALIKE
from ridgeline.spec.errors import UserError

SPACE = """
base = "a100-80g-sxm"
[vary]
cores = [27, 54, 108]
"core.array" = ["16x16", "32x32"]
memory = [
  { kind = "hbm2e", channels = 4, channel_bandwidth = 409.6e9, bytes = 64e9 },
  { kind = "pcie5", channels = 256, channel_bandwidth = 4e9, bytes = 512e9 },
]
[limit]
area_mm2 = 700
"""


def space(tmp_path, text=SPACE):
    path = tmp_path / "space.toml"
    path.write_text(text)
    return read_space(path)


def generation(**more):
    workload = {"kind": "generate", "batch_size": 8, "prompt_len": 512, "output_len": 32, **more}
    return experiments.make("llama2-13b", "a100-80g-sxm", workload, [])


@pytest.fixture
def swept(tmp_path):
    return sweep(space(tmp_path), generation(), chips.prices("2023-10"))


def test_every_design_is_there_and_dropped_with_a_reason(swept):
    assert len(swept.designs) == 12
    assert sum(swept.dropped.values()) == sum(bool(d.dropped) for d in swept.designs)
    for d in swept.designs:
        assert bool(d.metrics) != bool(d.dropped) or d.dropped.startswith(("area", "edge", "power", "price")) != bool(
            d.metrics
        )
        assert (d.area > 700) == d.dropped.startswith("area")


def test_the_front_is_what_nothing_beats(swept):
    good = [d for d in swept.designs if not d.dropped]
    names = {d.chip.name for d in swept.front}
    for d in good:
        cheaper = [o for o in good if o.metrics["dollars"] <= d.metrics["dollars"]
                   and o.metrics["tokens_per_s"] >= d.metrics["tokens_per_s"] and o is not d]  # fmt: skip
        strictly = [o for o in cheaper if o.metrics["dollars"] < d.metrics["dollars"]
                    or o.metrics["tokens_per_s"] > d.metrics["tokens_per_s"]]  # fmt: skip
        assert (d.chip.name in names) == (not strictly) or (cheaper and not strictly)


def test_metrics_are_those_of_the_predictor(swept):
    d = swept.front[0]
    r = predict(experiments.make("llama2-13b", on_design(generation(), d.chip).cluster, {
        "kind": "generate", "batch_size": 8, "prompt_len": 512, "output_len": 32}, []))  # fmt: skip
    assert d.metrics["tokens_per_s"] == r.metrics["tokens_per_s"].value
    assert d.metrics["tokens_per_s_per_dollar"] == pytest.approx(d.metrics["tokens_per_s"] / d.cost.total)


def test_cores_keep_their_ports_and_spares(tmp_path):
    half = next(c for c, said in space(tmp_path).designs() if "cores=54" in said)
    base = chips.chip("a100-80g-sxm")
    assert half.cores_on_die == 64
    assert half.cache_bytes_per_clock == base.cache_bytes_per_clock / 2
    assert half.watts == 0, "the base's rating is not the design's"
    assert total_mm2(half) < total_mm2(base)


def test_limits_of_metrics(tmp_path):
    tight = sweep(space(tmp_path, SPACE + "tpot_s = 0.02\ntokens_per_s = 200\n"), generation(), chips.prices("2023-10"))
    for d in tight.designs:
        if not d.dropped:
            assert d.metrics["tpot_s"] <= 0.02
            assert d.metrics["tokens_per_s"] >= 200
    assert {"tpot_s", "tokens_per_s"} & set(tight.dropped)
    with pytest.raises(UserError, match="unknown metric 'tpot_ms'"):
        sweep(space(tmp_path, SPACE + "tpot_ms = 20\n"), generation(), chips.prices("2023-10"))


def test_power_price_and_edge_drop_designs(tmp_path):
    found = sweep(space(tmp_path, SPACE + "watts = 300\ndollars = 510\n"), generation(), chips.prices("2023-10"))
    assert {"power", "price"} <= set(found.dropped)
    assert all(d.watts <= 300 and d.cost.total <= 510 for d in found.designs if not d.dropped)
    narrow = SPACE.replace("cores = [27, 54, 108]", "cores = [8]")
    assert sweep(space(tmp_path, narrow), generation(), chips.prices("2023-10")).dropped["edge"]
    tight = sweep(space(tmp_path, SPACE + "edge_mm = 60\n"), generation(), chips.prices("2023-10"))
    assert all(edge_mm(d.chip) <= 60 for d in tight.designs if not d.dropped)
    assert tight.dropped["edge"]


def test_a_model_that_does_not_fit_is_dropped(tmp_path):
    e = experiments.make(
        "llama2-70b", "a100-80g-sxm", {"kind": "generate", "batch_size": 1, "prompt_len": 128, "output_len": 8}, []
    )
    found = sweep(space(tmp_path), e, chips.prices("2023-10"))
    assert found.dropped["memory"] == 4, "64 GB of HBM, in designs within the area"
    assert found.front
    assert all(d.chip.memory.kind == "pcie5" for d in found.front)
    assert found.verdict(found.front[0]) is None, "the base cannot hold it either"


def test_a_second_process_changes_nothing(tmp_path, monkeypatch):
    from ridgeline.search import designs

    monkeypatch.setattr(designs, "_POOL", 2)
    one, two = (sweep(space(tmp_path), generation(), chips.prices("2023-10"), workers=n) for n in (1, 2))
    assert [d.metrics for d in one.designs] == [d.metrics for d in two.designs]


def test_the_best_plan_of_each_design_is_no_slower(tmp_path):
    from ridgeline.search import Question
    from ridgeline.spec.plan import Plan

    text = SPACE.replace("[27, 54, 108]", "[54]").replace('["16x16", "32x32"]', '["16x16"]')
    e = generation()
    question = Question(e.model, e.cluster, e.workload, "throughput", {}, Plan(), only=frozenset({"flash_attention"}))
    plain = sweep(space(tmp_path, text), e, chips.prices("2023-10"))
    best = sweep(space(tmp_path, text), e, chips.prices("2023-10"), question=question, workers=1)
    for before, after in zip(plain.designs, best.designs, strict=True):
        if not before.dropped:
            assert after.metrics["tokens_per_s"] >= (1 - ALIKE) * before.metrics["tokens_per_s"]
            assert after.plan


def test_tables_and_picture(swept):
    front, verdicts = design_tables.sweep_tables(swept)
    assert len(front.rows) == len(verdicts.rows) + 1, "the base stands below the front"
    picture = design_tables.sweep_svg(swept)
    kept = sum(not d.dropped for d in swept.designs)
    assert picture.count("<circle") == kept + 2, "and two in the legend"
    assert json.loads(json.dumps(design_tables.as_dict(swept)))["designs"] == 12


def test_axes():
    assert non_dominated([], ("dollars", "tokens_per_s")) == []
    with pytest.raises(UserError, match="no metric"):
        non_dominated([], ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('bas = "ga100"', "unknown key 'bas'"),
        ("[vary]\ncores = [1]", "has no base"),
        ('base = "ga100"', "varies nothing"),
        ('base = "ga100"\n[vary]\ncores = 3', "not a list"),
        ('base = "ga100"\n[vary]\ncores = [64]\n[limit]\nwatts = -1', "limit watts"),
    ],
)
def test_a_mistake_in_a_space_is_named(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        space(tmp_path, text)


def test_a_choice_that_is_no_chip_is_named(tmp_path):
    bad = space(tmp_path, 'base = "ga100"\n[vary]\n"core.lans" = [4]\n')
    with pytest.raises(UserError, match=r"core\.lans"):
        list(bad.designs())


def test_commands(tmp_path):
    run = CliRunner().invoke
    path = tmp_path / "space.toml"
    path.write_text(SPACE)
    assert "ga100" in run(app, ["hardware", "chips"]).stdout
    shown = run(app, ["hardware", "show", "ga100", "--json", "--out", str(tmp_path / "d.toml")])
    assert json.loads(shown.stdout)["dies_per_wafer"] == 62
    assert catalog.device(str(tmp_path / "d.toml")).chip == chips.chip("ga100")
    assert chip_device(chips.chip("ga100")) == catalog.device("ga100")
    args = ["hardware", "sweep", str(path), "llama2-13b", "--batch-size", "8", "--output-len", "32"]
    found = run(app, [*args, "--svg", str(tmp_path / "a.svg"), "--out", str(tmp_path / "front"), "--json"])
    assert found.exit_code == 0
    assert json.loads(found.stdout)["front"]
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    for file in Path(tmp_path / "front").glob("*.toml"):
        assert catalog.device(str(file)).chip is not None
    path.write_text(SPACE.replace("area_mm2 = 700", "area_mm2 = 10"))
    assert run(app, args).exit_code == 1
