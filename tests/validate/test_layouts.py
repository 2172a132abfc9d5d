"""Parts of a training run's layout that a row leaves open: the best that fits, as a user would take it, and said."""

import pytest
from tests.validate.test_training import row

from ridgeline.predict import predict
from ridgeline.validate import training_rows as training
from ridgeline.validate.csv_table import BadCell
from ridgeline.validate.layouts import Judged, Layout, best, layouts, smallest_first

SMALL = {"n_devices": 8, "global_batch": 128, "micro_batch": 4, "dp": "", "flash": 1}
LARGE = {"layers": 80, "hidden": 10240, "heads": 80, "kv_heads": 80, "ffn": 40960, "n_devices": 64, "micro_batch": 1,
         "global_batch": 64, "flash": 1, "sequence_parallel": 1, "dp": ""}  # fmt: skip
"""100 billion parameters."""


def chosen(**changes):
    r = row(**changes)
    e, said = training.settled(r)
    return e, said, r.assumed


def test_a_small_model_is_not_divided():
    e, said, assumed = chosen(**SMALL, tp="", pp="?")
    assert e.parallel.get("tp", 1) == e.parallel.get("pp", 1) == 1
    assert said.startswith("not stated: tp=1, pp=1")
    assert (assumed["tp"], assumed["pp"]) == ("1", "1")


def test_a_large_model_is_divided_until_it_fits():
    """By tensor parallelism within a node alone if that is enough, and by stages, too."""
    undivided = {**LARGE, "tp": 1, "pp": 1}
    assert predict(training.experiment(row(**undivided))).status != "ok"
    for open_ in ({"tp": "", "pp": 8}, {"tp": 8, "pp": ""}, {"tp": "", "pp": ""}):
        e, said, assumed = chosen(**{**LARGE, **open_})
        assert predict(e).status == "ok"
        assert e.parallel["tp"] <= e.cluster.devices_per_node
        for name, value in open_.items():
            assert (f"{name}={e.parallel.get(name, 1)}" in said) == (value == "")
        assert (assumed.get("tp") is None) == (open_["tp"] != "")


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_replicas_that_are_stated_leave_one_degree(degree):
    e, said, assumed = chosen(**{**SMALL, "tp": "", "dp": 8 // degree})
    assert e.parallel.get("tp", 1) == degree
    assert assumed["tp"] == str(degree)
    assert said == ""


@pytest.mark.parametrize(
    ("cells", "degrees"),
    [
        ({"n_devices": 1536, "tp": 8, "pp": "", "dp": 16, "layers": 96}, (8, 12)),  # of Megatron-LM's runs of GPT-3
        ({"n_devices": 2240, "tp": 8, "pp": "", "dp": 8, "layers": 105}, (8, 35)),
        ({"n_devices": 12, "nodes_of": 6, "tp": "", "pp": 1, "dp": 4}, (3, 1)),
        ({"n_devices": 32, "nodes_of": 4, "tp": "", "pp": 1, "dp": 4}, (8, 1)),  # over nodes, as nothing else agrees
        ({"n_devices": 48, "tp": 1, "pp": "", "dp": 3}, (1, 16)),  # stages of one and of two layers
        ({"n_devices": 32, "tp": "", "pp": 1, "dp": 1}, (1, 1)),  # 24 heads on 32 devices: the cell is wrong
    ],
)
def test_replicas_that_are_stated_leave_degrees_of_any_size(cells, degrees):
    r = row(**{**SMALL, "global_batch": 3360, "micro_batch": 1, "interleave": 1, **cells})
    e = training.settled(r)[0]
    assert (e.parallel.get("tp", 1), e.parallel.get("pp", 1)) == degrees
    assert {name: int(value) for name, value in r.assumed.items() if name in ("tp", "pp")} == {
        name: degree for name, degree in zip(("tp", "pp"), degrees, strict=True) if cells[name] == ""
    }


def test_replicas_that_agree_with_nothing_are_left_aside():
    assert chosen(**{**SMALL, "tp": "", "dp": 3})[0].parallel.get("tp", 1) == 1


def test_open_stages_of_zero_are_those_of_the_software_where_it_fits():
    small, _, said = chosen(**SMALL, zero_stage="")
    assert not small.plan.has("zero")
    assert said["zero_stage"] == "0"
    sharded, words, said = chosen(**{**LARGE, "zero_stage": "?", "recompute": "full"})
    assert sharded.plan.option("zero", "stage") == int(said["zero_stage"]) > 0
    assert f"zero_stage={said['zero_stage']}" in words
    native, _, said = chosen(**SMALL, zero_stage="", source="torchtitan")
    assert native.plan.option("zero", "stage") == int(said["zero_stage"]) == 3


def test_what_makes_no_difference_or_leaves_a_node_is_not_tried():
    def allowed(**cells):
        made = training.experiment(
            row(**{**SMALL, "tp": 1, "pp": 1, **{k: cells[k] for k in ("n_devices", "nodes_of")}})
        )
        return layouts(row(**{**SMALL, "zero_stage": "", "interleave": "", **cells}), made.model, made.cluster, 0)

    wide = allowed(n_devices=32, nodes_of=4, tp="", pp="")
    assert {a.tp for a in wide} == {1, 2, 4}
    assert {a.interleave for a in wide if a.pp == 1} == {1} < {a.interleave for a in wide}
    assert {a.zero_stage for a in wide if a.model_ranks == 32} == {0} < {a.zero_stage for a in wide}
    stated = allowed(n_devices=32, nodes_of=4, tp="", pp="", dp=4)
    assert {(a.tp, a.pp) for a in stated} == {(1, 8), (2, 4), (4, 2)}


def test_chunks_of_a_run_without_stages_are_not_said():
    _, said, assumed = chosen(**SMALL, tp="", pp="", interleave="")
    assert said.startswith("not stated: tp=1, pp=1")
    assert "interleave" not in said
    assert "interleave" not in assumed


def test_columns_that_are_missing_are_techniques_that_were_not_used():
    r = row(**SMALL)
    for name in ("tp", "pp", "zero_stage"):
        del r.cells[name]
    e, said = training.settled(r)
    assert e.parallel == {}
    assert said == ""
    assert not {"tp", "pp", "zero_stage"} & r.assumed.keys()


def test_a_model_that_fits_in_no_way_is_taken_where_it_is_smallest():
    e, said, _ = chosen(**{**LARGE, "n_devices": 2, "global_batch": 2, "nodes_of": 2, "device": "v100-16g-sxm",
                           "tp": "", "recompute": ""})  # fmt: skip
    assert predict(e).status != "ok"
    assert "recompute=full" in said
    with pytest.raises(BadCell, match="not a possible run"):
        training.settled(row(**{**LARGE, "tp": "", "pp": 7}))


def test_less_model_parallelism_wins_near_ties():
    def judged(tp, stage, merit, fits=True):
        return Judged(Layout(tp, 1, 1, stage, 1, 1, "none"), fits, merit)

    assert best([judged(1, 0, 97), judged(2, 0, 100)], 0).tp == 1
    assert best([judged(1, 0, 90), judged(2, 0, 100)], 0).tp == 2
    assert best([judged(1, 1, 100), judged(1, 0, 98)], 0).zero_stage == 0
    assert best([judged(1, 3, 98), judged(1, 0, 100)], 3).zero_stage == 3
    assert best([judged(1, 0, -5, False), judged(2, 0, 1)], 0).tp == 2
    assert best([judged(1, 0, -5, False), judged(2, 0, -4, False)], 0).tp == 2


@pytest.mark.parametrize(
    "cells",
    [{**LARGE, "tp": "", "pp": 4},
     {**LARGE, "layers": 40, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 16384, "n_devices": 16, "tp": "",
      "pp": 2, "zero_stage": 3, "source": "internlm"}],
    ids=["stages", "shards"],
)  # fmt: skip
def test_layouts_that_are_left_out_take_more_memory_than_one_that_does_not_fit(cells):
    """In the second case one micro-batch takes less memory than several smaller ones, whose gradients are added up."""
    r = row(**{**cells, "micro_batch": "", "recompute": "", "interleave": ""})
    e = training.experiment(row(**{**cells, "tp": 8}))
    allowed = smallest_first(layouts(r, e.model, e.cluster, 0))
    assert len(allowed) > 20
    peaks = {}
    for a in allowed:
        try:
            found = training.experiment(
                row(**{**cells, "tp": a.tp, "micro_batch": a.micro_batch, "recompute": a.recompute,
                       "interleave": a.interleave}))  # fmt: skip
        except BadCell:
            continue
        peaks[a] = predict(found).peak_bytes
    order = list(peaks)
    within = [(a, b) for i, a in enumerate(order) for b in order[i:] if a.is_within(b)]
    assert len(within) > len(order)
    assert all(peaks[a] <= peaks[b] * (1 + 1e-9) for a, b in within)
    assert not any(b.is_within(a) for i, a in enumerate(order) for b in order[i + 1 :])
    assert min(peaks.values()) < max(peaks.values())
