"""Chips as data: derived peaks, files, the device that a chip makes."""

import pytest

from ridgeline import catalog, experiments
from ridgeline.catalog import chips
from ridgeline.hardware.device import chip_device
from ridgeline.predict import predict
from ridgeline.spec.device import Cluster
from ridgeline.spec.errors import UserError

GENERATE = {"kind": "generate", "batch_size": 8, "prompt_len": 512, "output_len": 64}


@pytest.mark.parametrize("name", ["a100-80g-sxm", "h100-sxm"])
def test_a_design_gives_what_the_datasheet_says(name):
    design, sheet = chip_device(chips.chip(name)), catalog.device(name)
    for dtype in ("bf16", "fp16", "tf32", "int8"):
        assert design.peak_flops[dtype] == pytest.approx(sheet.peak_flops[dtype], rel=0.002)
    assert design.memory_bandwidth == pytest.approx(sheet.memory_bandwidth, rel=0.001)
    assert design.link.bandwidth == sheet.link.bandwidth
    assert (design.sm_count, design.l2_bytes, design.watts) == (sheet.sm_count, sheet.l2_bytes, sheet.watts)


def test_a_design_of_a_known_chip_predicts_as_it():
    own = Cluster(device=chip_device(chips.chip("a100-80g-sxm")))
    times = [predict(experiments.make("llama2-7b", on, GENERATE, [])).metrics["e2e_s"].value
             for on in ("a100-80g-sxm", own)]  # fmt: skip
    assert times[0] == pytest.approx(times[1], rel=0.001)


@pytest.mark.parametrize("name", chips.chips())
def test_every_chip_runs_a_model(name):
    r = predict(experiments.make("llama2-7b", f"2x{name}", GENERATE, ["tensor_parallel:degree=2"]))
    assert r.status == "ok"
    assert r.metrics["tokens_per_s"].value > 0


@pytest.mark.parametrize("array", [(17, 16), (20, 16), (24, 24), (32, 16), (16, 32), (48, 16)])
def test_larger_arrays_decode_no_slower(array):
    """Decoding waits for memory, whatever the sides of the arrays are."""
    table, where = chips.chip_document("ga100")
    core = {**table["core"], "array": {**table["core"]["array"], "rows": array[0], "columns": array[1]}}
    larger = chips.chip_from({**table, "core": core}, where)
    base, own = (
        predict(experiments.make("llama2-7b", Cluster(device=chip_device(c)), {**GENERATE, "batch_size": 1}, []))
        for c in (chips.chip("ga100"), larger)
    )
    assert own.metrics["tpot_s"].value == pytest.approx(base.metrics["tpot_s"].value, rel=0.05)


def test_a_design_is_marked_as_such():
    r = predict(experiments.make("llama2-7b", "llmcompass-latency", GENERATE, []))
    assert r.metrics["tokens_per_s"].source == "class default"


def test_a_device_file_gives_the_same_prediction(tmp_path):
    design = chip_device(chips.chip("llmcompass-throughput"))
    path = tmp_path / "design.toml"
    path.write_text(catalog.device_toml(design))
    read = catalog.device(str(path))
    assert read.chip == design.chip
    found = [predict(experiments.make("llama2-7b", on, GENERATE, [])).metrics["e2e_s"].value
             for on in ("llmcompass-throughput", str(path))]  # fmt: skip
    assert found[0] == found[1]


def test_a_chip_file_says_what_differs(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('like = "ga100"\ncores = 64\n[core.array]\nrows = 32\n')
    c = chips.chip(str(path))
    assert (c.name, c.cores, c.core.array.rows, c.core.array.columns) == ("mine", 64, 32, 16)
    assert catalog.device(str(path)).peak_flops["bf16"] == pytest.approx(chips.chip("ga100").peak_flops["bf16"])
    assert predict(experiments.make("llama2-7b", f"4x{path}", GENERATE, [])).status == "ok"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('like = "ga100"\nprocess = "n3"', "unknown process 'n3'"),
        ('like = "ga100"\ncors = 3', "unknown key 'cors'"),
        ('like = "ga10"', "unknown chip 'ga10'"),
        ('like = "ga100"\n[memory]\nkind = "hbm9"', "unknown interface 'hbm9'"),
        ('like = "ga100"\n[memory]\nactive = 7', "7 active channels of 6"),
        ('like = "ga100"\ncores_on_die = 100', "128 working cores of 100"),
        ('like = "ga100"\ncores = "many"', "'cores'"),
    ],
)
def test_a_mistake_in_a_chip_file_is_named(tmp_path, text, message):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        chips.chip(str(path))


def test_unknown_names():
    with pytest.raises(UserError, match=r"unknown chip 'ga101'[\s\S]*'ga100'"):
        chips.chip("ga101")
    with pytest.raises(UserError, match="unknown price date '1999'"):
        chips.prices("1999")
    with pytest.raises(UserError, match="cannot read chip file"):
        chips.chip("nowhere.toml")


def test_prices_of_ones_own(tmp_path):
    path = tmp_path / "today.toml"
    path.write_text("dollars_per_gb = { hbm3 = 12.0 }\nwafer_dollars = { n5 = 15000 }\n")
    from ridgeline.hardware.cost import cost

    found = cost(chips.chip("h100-sxm"), chips.prices(str(path)))
    assert found.memory == pytest.approx(12.0 * 80)
    assert found.rates.wafer == 15000
