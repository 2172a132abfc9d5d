"""Rows of measured training runs become experiments, whatever is empty or unknown in them."""

import pytest

from ridgeline.spec.errors import UserError
from ridgeline.validate import memory_rows as memory
from ridgeline.validate import training_rows as training
from ridgeline.validate.csv_table import BadCell, CsvRow

ROW = {
    "family": "gpt", "gated": "0", "layers": "24", "hidden": "2304", "heads": "24", "kv_heads": "24", "ffn": "9216",
    "vocab": "51200", "seq_len": "2048", "id": "a-run", "device": "a100-80g-sxm", "nodes_of": "8", "n_devices": "32",
    "tp": "1", "pp": "1", "dp": "32", "cp": "1", "zero_stage": "0", "interleave": "1", "micro_batch": "16",
    "global_batch": "512", "recompute": "full", "sequence_parallel": "0", "precision": "fp16", "compile": "0",
    "flash": "0", "inter_node": "8x200Gb/s", "tflops_per_device": "137",
    "flops_formula": "96*B*s*l*h^2*(1+s/(6h)+V/(16lh))", "source": "test", "activation_offload": "",
    "tokens_per_s_per_device": "", "mfu": "", "hfu": "", "step_s": "", "memory_bytes": "",
}  # fmt: skip


def row(**changes):
    return CsvRow(2, {**ROW, **{k: str(v) for k, v in changes.items()}})


def test_a_row_as_an_experiment():
    e = training.experiment(row(tp=8, pp=2, n_devices=512, interleave=2, sequence_parallel=1, micro_batch=1,
                                global_batch=512))  # fmt: skip
    assert (e.world, e.data_parallel, e.accumulation) == (512, 32, 16)
    assert e.plan.has("sequence_parallel")
    assert e.plan.option("pipeline", "chunks") == 2
    assert e.model.num_parameters == pytest.approx(12 * 24 * 2304**2 + 51200 * 2304 + 2048 * 2304, rel=0.01)
    assert e.cluster.device.network.bandwidth == 25e9


@pytest.mark.parametrize(
    ("text", "bandwidth"),
    [("8x200Gb/s", 25e9), ("1600Gb/s per node", 25e9), ("4x100Gbps", 6.25e9), ("100 GB/s", 12.5e9), ("", None)],
)
def test_networks(text, bandwidth):
    device = training.experiment(row()).cluster.device
    assert training.network(text, device, 8).bandwidth == (bandwidth or device.network.bandwidth)


@pytest.mark.parametrize("quantity", ["tokens_per_s_per_device", "tflops_per_device", "mfu", "hfu", "step_s"])
def test_whichever_quantity_was_published(quantity):
    empty = dict.fromkeys(("tflops_per_device", "tokens_per_s_per_device", "mfu", "hfu", "step_s"), "")
    (case,) = training.cases(row(**{**empty, "flops_formula": "", quantity: 0.5}))
    assert case.quantity == quantity
    assert case.predicted > 0
    assert case.better == ("lower" if quantity == "step_s" else "higher")


def test_quantities_agree_with_each_other():
    def predicted(name, formula=""):
        empty = dict.fromkeys(("tflops_per_device", "step_s"), "")
        return training.cases(row(**{**empty, "flops_formula": formula, name: 1}))[0].predicted

    rate = predicted("tokens_per_s_per_device")
    assert predicted("step_s") * rate == pytest.approx(512 * 2048 / 32)
    n, attention = 1.66e9, 12 * 24 * 2304 * 2048
    assert predicted("mfu") == pytest.approx(rate * (6 * n + attention) / 312e12, rel=0.03)
    assert predicted("hfu") == pytest.approx(predicted("mfu") * 4 / 3)
    ratio = predicted("tflops_per_device", ROW["flops_formula"]) / predicted("tflops_per_device", "72*B*s*l*h^2*(…)")
    assert ratio == pytest.approx(96 / 72)
    assert predicted("tflops_per_device", "6*N*D") < predicted("tflops_per_device")


@pytest.mark.parametrize(
    "device", ["h100-sxm", "h200-sxm", "h20", "v100-32g-sxm", "v100-16g-sxm", "a100-40g-sxm", "mi250x", "mi300x",
               "l40s", "l4", "t4", "b200", "rtx4090", "rtx3090", "h800", "a6000"],
)  # fmt: skip
def test_every_device_with_nothing_else_stated(device):
    unknown = dict.fromkeys(("tp", "pp", "cp", "dp", "zero_stage", "interleave", "recompute", "sequence_parallel",
                             "precision", "compile", "flash", "inter_node", "nodes_of", "vocab", "ffn", "kv_heads",
                             "activation_offload", "flops_formula"), "?")  # fmt: skip
    # On a node, and on two: of 32 devices there are several times as many layouts, of the same kinds.
    for family, devices in (("gpt", 4), ("mpt", 4), ("llama", 4), ("", 16)):
        stated = {"device": device, "family": family, "gated": "", "n_devices": devices, "global_batch": 4 * devices}
        (case,) = training.cases(row(**{**unknown, **stated}))
        assert case.predicted > 0
        assert device in case.group


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_precisions_and_stages(precision, stage):
    (case,) = training.cases(row(device="h100-sxm", precision=precision, zero_stage=stage))
    assert case.predicted > 0


def test_recomputation_that_is_not_stated_follows_from_the_memory():
    assert training.experiment(row(recompute="?", micro_batch=16)).plan.has("recompute")
    assert not training.experiment(row(recompute="?", micro_batch=1, flash=1)).plan.has("recompute")
    assert not training.experiment(row(recompute="none")).plan.has("recompute")


def test_what_is_left_open_of_a_layout_is_the_fastest_that_fits_and_said():
    pipelined = {"tp": 4, "pp": 4, "n_devices": 64, "global_batch": 64, "flash": 1, "device": "h100-sxm"}
    _, chosen = training.settled(row(**pipelined, micro_batch="", interleave="?", recompute=""))
    assert chosen == "not stated: micro_batch=1, interleave=1, recompute=none"
    (case,) = training.cases(row(**pipelined, micro_batch="", interleave="?", recompute=""))
    assert case.label.endswith(f"({chosen})")
    (worse,) = training.cases(row(**pipelined, micro_batch=16, interleave=1, recompute="full"))
    assert worse.predicted < case.predicted
    assert training.settled(row(**pipelined, micro_batch=1, interleave=2))[1] == ""


def test_packed_examples_attend_to_themselves_only():
    plain, packed, short = (
        training.cases(row(flash=1, **change))[0].predicted
        for change in ({}, {"note": "packed sequences"}, {"note": "packed sequences", "seq_len": 512})
    )
    assert packed > plain
    assert short == training.cases(row(flash=1, seq_len=512))[0].predicted


def test_alternatives_differ_in_their_plan_only():
    a, b, other = (
        training.cases(row(**c))[0].alternatives for c in ({}, {"tp": 2, "micro_batch": 8}, {"global_batch": 1024})
    )
    assert a == b != other


def test_memory_is_a_case_of_its_own():
    speed, peak = training.cases(row(memory_bytes=40e9))
    assert (speed.quantity, peak.quantity) == ("tflops_per_device", "memory_bytes")
    assert peak.group.endswith("memory")


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"layers": ""}, BadCell, "'layers' is empty"),
        ({"hidden": "wide"}, BadCell, "not a number"),
        ({"tflops_per_device": "nan"}, BadCell, "no measured quantity"),
        ({"tflops_per_device": "-3"}, BadCell, "not larger than 0"),
        ({"tp": 7}, BadCell, "not a possible run"),
        ({"recompute": "often"}, BadCell, "'recompute': 'often' is neither full nor selective nor none"),
        ({"device": "h1000"}, UserError, "unknown device"),
    ],
)
def test_bad_rows(changes, error, says):
    with pytest.raises(error, match=says):
        training.cases(row(**changes))


MEMORY = {
    "source": "test", "model": "megatron-22B", "mode": "none", "quantity": "activations_GiB", "value": "59.25",
    "num_procs": "8", "tensor_par": "8", "pipeline_par": "1", "data_par": "1", "batch_size": "4",
    "microbatch_size": "4", "datatype": "float16", "activation_recompute": "none", "pipeline_interleaving": "1",
    "tensor_par_comm_type": "ar",
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "ranks", "pp", "chunks"),
    [("megatron-22B", 8, 1, 1), ("gpt3-175B", 64, 8, 3), ("turing-530B", 280, 35, 3)],
)
def test_activation_memory_of_the_paper(model, ranks, pp, chunks):
    """s·b·h·L (10 + 24/t + 5as/(ht)) · (1 + (p-1)/(pv)) on the first stage: arXiv:2205.05198, eq. 2 and 4.2.3."""
    from ridgeline import catalog

    m = catalog.model(model.lower())
    micro = 4 if pp == 1 else 1
    t, s, h, a = 8, 2048, m.hidden_size, m.num_heads
    layers = m.num_layers * (1 + (pp - 1) / (pp * chunks))
    whole = layers * s * micro * h * (10 + 24 / t + 5 * a * s / (h * t)) / 2**30
    cells = {**MEMORY, "model": model, "num_procs": str(ranks), "pipeline_par": str(pp), "microbatch_size": str(micro),
             "batch_size": str(max(4, ranks)), "pipeline_interleaving": str(chunks), "value": str(whole)}  # fmt: skip
    (case,) = memory.cases(CsvRow(2, cells))
    assert case.error == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize(("column", "value", "says"), [
    ("quantity", "flops", "'flops' is not known"), ("activation_recompute", "often", "'often' is neither full nor"),
])  # fmt: skip
def test_unknown_values(column, value, says):
    with pytest.raises(BadCell, match=says):
        memory.cases(CsvRow(2, {**MEMORY, column: value}))
