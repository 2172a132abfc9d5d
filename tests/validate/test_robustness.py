"""Measured data as the world writes it: every known device and family, odd spellings, and broken files."""

import csv
import json
import math

import pytest

from ridgeline import catalog
from ridgeline.spec.errors import UserError
from ridgeline.validate import attention_rows as attention
from ridgeline.validate import collective_rows as collectives
from ridgeline.validate import gemm_rows as gemm
from ridgeline.validate import generation_rows as generation
from ridgeline.validate import memory_rows as memory
from ridgeline.validate import nouns
from ridgeline.validate import serving_rows as serving
from ridgeline.validate import training_rows as training
from ridgeline.validate.csv_table import BadCell, CsvRow, read_table
from ridgeline.validate.run import run
from ridgeline.validate.score import baseline
from ridgeline.validate.validation_report import assumed_lines, rows_csv

DEVICES = [
    "a100-40g-sxm", "a100-80g-sxm", "a100-80g-pcie", "a800-80g", "h100-sxm", "h100-pcie", "h100-96g-hbm2e-500w",
    "h200-sxm", "h800", "h20", "l40s", "l4", "t4", "a6000", "v100-16g-sxm", "v100-32g-sxm", "rtx4090", "rtx3090",
    "b200", "mi250x", "mi300x",
]  # fmt: skip
GEMM = "device,dtype,m,n,k,seconds,source\n"
GOOD = "h100-sxm,bf16,16,4096,4096,2e-5,test\n"


def row(**cells):
    return CsvRow(2, {k: str(v) for k, v in cells.items()})


def run_of(**changes):
    base = {"family": "llama", "layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008, "vocab": 32000, "seq_len": 2048,
            "device": "a100-80g-sxm", "nodes_of": 8, "n_devices": 8, "micro_batch": 1, "global_batch": 64,
            "recompute": "none", "zero_stage": 3, "mfu": 0.4}  # fmt: skip
    return row(**{**base, **changes})


# ---- every device ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_operators_stay_near_the_roofline_on_every_device(device):
    for dtype in ("bf16", "fp16", "fp8", "int8", "int4", "fp32", "tf32", "half", "int4_wo"):
        for m, n, k in ((1, 4096, 4096), (1, 1, 1), (128, 1024, 8192), (7, 333, 129), (16384, 28672, 8192)):
            (case,) = gemm.cases(row(device=device, dtype=dtype, m=m, n=n, k=k, seconds=1))
            roof = max(case.terms[:2])
            assert 0.98 * roof < case.predicted < 5 * roof + 5e-5, case.label
    for dim, heads, kv_heads in ((64, 32, 32), (80, 32, 1), (128, 64, 8), (256, 8, 4)):
        for phase, q, kv, causal in (("prefill", 2048, 2048, 1), ("prefill", 2048, 2048, 0), ("decode", 1, 8192, 0)):
            (case,) = attention.cases(
                row(device=device, phase=phase, dtype="fp16", kv_dtype="", batch=16, q_len=q, kv_len=kv, n_heads=heads,
                    n_kv_heads=kv_heads, head_dim=dim, causal=causal, seconds=1)
            )  # fmt: skip
            roof = max(case.terms[:2])
            assert 0.98 * roof < case.predicted < 8 * roof + 5e-5, case.label
    for op in ("allreduce", "all-gather", "ReduceScatter", "all2all", "broadcast", "send_recv"):
        for ranks, link in ((2, "nvlink"), (8, "pcie"), (64, "inter-node"), (16, "")):
            (case,) = collectives.cases(
                row(device=device, op=op, dtype="float", ranks=ranks, bytes=2**28, link=link, seconds=1)
            )
            assert math.isfinite(case.predicted)
            assert case.predicted > 0


def test_collectives_over_pcie_are_slower_than_over_nvlink():
    def seconds(link):
        cells = {"op": "all_reduce", "dtype": "half", "ranks": 8, "bytes": 2**28, "seconds": 1}
        return collectives.cases(row(device="h100-sxm", link=link, **cells))[0].predicted

    assert seconds("pcie") > 4 * seconds("nvlink")
    assert seconds("IB") == seconds("inter-node") > seconds("intra-node")


# ---- runs and their spellings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family",
    ["llama", "mixtral", "gpt", "mpt", "bloom", "opt", "mistral", "gpt-neox", "falcon", "qwen2", "Llama-2", "?"],
)
def test_families(family):
    (case,) = training.cases(run_of(family=family))
    assert 0.05 < case.predicted < 0.9


def test_families_fill_in_what_they_imply():
    assert nouns.architecture(run_of(family="mixtral")).num_experts == 8
    neox = nouns.architecture(run_of(family="gpt-neox"))
    assert (neox.position, neox.gated, neox.qkv_bias, neox.tie_embeddings) == ("rope", False, True, False)
    assert nouns.architecture(run_of(family="opt")).activation == "relu"
    with pytest.raises(BadCell, match="not a possible model"):
        nouns.architecture(run_of(heads=160, hidden=25600, kv_heads=3))


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "fp8", "device": "h200-sxm"}, {"precision": "bf16-mixed"}, {"precision": "float16"},
        {"precision": "tf32"}, {"cp": 2, "seq_len": 8192}, {"flash": "3"}, {"flash": "FA2"}, {"flash": "False"},
        {"compile": "True"}, {"sequence_parallel": "true", "tp": 4}, {"activation_offload": 1}, {"gated": "yes"},
        {"pp": 2, "interleave": 4, "zero_stage": 1}, {"zero_stage": 2, "recompute": "uniform"},
        {"tp": 2, "pp": 2, "zero_stage": 1, "recompute": "selective"}, {"inter_node": "400Gb/s per GPU"},
        {"n_devices": 16, "inter_node": "100GbE"}, {"family": "mixtral", "ep": 8}, {"flops_formula": "unclear"},
        {"device": "v100-32g-sxm", "precision": "?"}, {"device": "mi250x", "nodes_of": "?"}, {"global_batch": "1001"},
    ],
)  # fmt: skip
def test_layouts_and_spellings(changes):
    for quantity in ("mfu", "hfu", "step_s", "memory_bytes", "tokens_per_s_per_device", "tflops_per_device"):
        (case,) = training.cases(run_of(**{"mfu": "", **changes, quantity: 1}))
        assert case.quantity == quantity
        assert math.isfinite(case.predicted)
        assert case.predicted > 0
        assert all(math.isfinite(t) and t >= 0 for t in case.terms)


def test_precisions_of_training_runs():
    """Blocks of float8 numbers (MXFP8) are multiplied as float8 is; what is no float is not taken for one."""
    (blocks,), (plain,) = (training.cases(run_of(device="b200", precision=name)) for name in ("mxfp8", "fp8"))
    assert blocks.predicted == plain.predicted
    with pytest.raises(BadCell, match="column 'precision': precision 'int8' is not known"):
        training.cases(run_of(device="b200", precision="int8"))


def test_links_between_nodes_in_words():
    device = catalog.device("h100-sxm")
    assert training.network("400Gb/s per GPU", device, 8).bandwidth == 50e9
    assert training.network("100GbE", device, 8).bandwidth == 12.5e9 / 8
    assert training.network("HDR", device, 8) == device.network
    assert training.network("0 Gb/s", device, 8) == device.network


def test_devices_and_models_from_the_rows_own_columns():
    own = {"device": "tpu-v9", "dtype": "bf16", "m": 4096, "n": 4096, "k": 4096, "seconds": 1}
    with pytest.raises(UserError, match="unknown device"):
        gemm.cases(row(**own))
    (case,) = gemm.cases(row(**own, peak_flops=400e12, memory_bandwidth=2e12))
    assert 2 * 4096**3 / 400e12 < case.predicted < 1e-3
    rows = {"model": "house-7b", "device": "H100_SXM", "tp": 1, "prompt_len": 512, "batch": 1, "output_len": 128,
            "ttft_s": 1, "tpot_s": 1}  # fmt: skip
    with pytest.raises(UserError, match="unknown model"):
        generation.cases(row(**rows))
    cases = generation.cases(row(**rows, layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000))
    assert [c.quantity for c in cases] == ["ttft_s", "tpot_s"]
    assert "h100-sxm house-7b" in cases[0].group


@pytest.mark.parametrize("backend", ["trtllm", "vllm", "sglang", "TensorRT-LLM"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8", "fp4", "int8", "int4", "awq", "int4_wo", "fp8_kv", ""])
def test_serving_backends_and_precisions(backend, precision):
    cells = {"model": "meta-llama/Meta-Llama-3.1-8B", "device": "h200-sxm", "tp": 1, "pp": 1, "input_len": 512,
             "output_len": 32, "concurrency": 4, "ttft_s": 1, "tpot_s": 1}  # fmt: skip
    for case in serving.cases(row(**cells, backend=backend, precision=precision)):
        assert 0 < case.predicted < 1


def test_serving_judges_the_first_token_of_a_single_token_answer():
    cells = {"model": "llama3.1-8b", "device": "h100-sxm", "tp": 1, "input_len": 512, "output_len": 1,
             "concurrency": 4, "ttft_s": 1, "tpot_s": 1}  # fmt: skip
    assert {c.quantity for c in serving.cases(row(**cells))} == {"ttft_s"}


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"pp": 2}, "pipeline"), ({"model": "deepseek-ai/DeepSeek-V9"}, "unknown model"), ({"backend": "x"}, "engine"),
     ({"precision": "fp3"}, "precision"), ({"model": "llama3.1-405b"}, "no request fits"), ({"tp": 3}, "heads")],
)  # fmt: skip
def test_what_serving_refuses_is_said(changes, why):
    cells = {"model": "llama3.1-8b", "device": "h100-sxm", "tp": 1, "input_len": 512, "output_len": 8,
             "concurrency": 4, "ttft_s": 1, "tpot_s": 1}  # fmt: skip
    with pytest.raises((UserError, BadCell), match=why):
        serving.cases(row(**{**cells, **changes}))


@pytest.mark.parametrize("model", ["megatron-22B", "gpt3-175b", "llama2-70b"])
def test_memory_rows_of_other_layouts(model):
    for tp, pp, ranks, chunks in ((1, 1, 2, 1), (2, 8, 16, 3), (4, 2, 40, 1)):
        for quantity in ("weights+optim_GiB", "activations_GiB", "activation_pct_of_baseline", "iteration_time_s"):
            cells = {"model": model, "quantity": quantity, "value": 10, "num_procs": ranks, "tensor_par": tp,
                     "pipeline_par": pp, "batch_size": 30, "microbatch_size": 4, "datatype": "bfloat16",
                     "activation_recompute": "full", "pipeline_interleaving": chunks}  # fmt: skip
            (case,) = memory.cases(row(**cells))
            assert case.predicted > 0


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        (GEMM + GOOD).encode("utf-8-sig"),
        (GEMM + GOOD).replace("\n", "\r\n").encode(),
        b'"device", "dtype",m,n,k,"seconds",source,extra\n"H100_SXM","BF16","16",4096,4096,"2e-5","a, b","x\xe9"\n',
        b"seconds,k,n,m,dtype,device\n2e-5,4096,4096,16,bfloat16,H100\n\n,,,,,\n",
    ],
)
def test_spellings_of_a_file(tmp_path, data):
    file = tmp_path / "gemm.csv"
    file.write_bytes(data)
    report = run(file)
    assert (report.judged, report.skipped) == (1, 0)
    assert report.files[0].scores[0].group == "h100-sxm bf16"


def test_bad_cells_are_named_and_good_rows_judged(tmp_path):
    bad = [
        "h100-sxm,bf16,sixteen,4096,4096,2e-5,t", "h100-sxm,bf16,16,4096,4096,nan,t", "h100-sxm,bf16,16,4096,4096,-1,t",
        "h100-sxm,bf16,16,4096,4096,inf,t", "h100-sxm,bf7,16,4096,4096,2e-5,t", "h101,bf16,16,4096,4096,2e-5,t",
        "h100-sxm,bf16,1.5,4096,4096,2e-5,t", "h100-sxm,bf16,16,4096", "h100-sxm,bf16,1e300,4096,4096,2e-5,t",
        "h100-sxm,bf16,0,4096,4096,2e-5,t", ",,,,,,x", "h100-sxm,bf16,16,4096,4096,1e-320,t",
    ]  # fmt: skip
    (tmp_path / "gemm.csv").write_text(GEMM + GOOD + "\n".join(bad) + "\n" + GOOD)
    (tmp_path / "notes.csv").write_text("a,b\n1,2\n")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "header.csv").write_text(GEMM)
    (tmp_path / "README.md").write_text("not data")
    report = run(tmp_path)
    assert report.judged == 2
    assert report.skipped == len(bad)
    skipped = {s.line: s.reason for f in report.files for s in f.skipped}
    assert list(skipped) == list(range(3, 3 + len(bad)))
    assert "'m': 'sixteen' is not a number" in skipped[3]
    assert "unknown device 'h101'" in skipped[8]
    assert {name for name, _ in report.ignored} == {"notes.csv", "empty.csv"}
    document = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert document["skipped"] == len(bad)
    promised = "file group n median_ape mean_ape p90_ape bias within_10 within_20 baseline_mean_ape"
    assert set(document["groups"][0]) >= set(promised.split())


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "no CSV header"), ("device,dtype,m,n,seconds\n", "also needs k"), ("device,device,m\n", "there twice")],
)
def test_files_that_are_of_no_use(tmp_path, text, why):
    file = tmp_path / "x.csv"
    file.write_text(text)
    with pytest.raises(UserError, match=why):
        run(file)


def test_a_hole_in_a_model_costs_one_row(tmp_path, monkeypatch):
    file = tmp_path / "gemm.csv"
    file.write_text(GEMM + GOOD + GOOD)
    calls = []

    def broken(device):
        calls.append(device)
        if len(calls) == 1:
            raise ZeroDivisionError("division by zero")
        return catalog.device("h100-sxm")

    monkeypatch.setattr(gemm, "device_of", broken)
    report = run(file)
    assert (report.judged, report.skipped) == (1, 1)
    assert "ZeroDivisionError" in report.files[0].skipped[0].reason


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("0", False), ("True", True), ("no", False), ("2", True), ("v3", True), ("FA2", True), ("?", None),
     ("", None), ("0.0", False)],
)  # fmt: skip
def test_flags(text, value):
    for default in (True, False):
        assert row(a=text).flag("a", default) is (default if value is None else value)


def test_a_flag_that_is_none():
    with pytest.raises(BadCell, match="neither yes nor no"):
        row(a="maybe").flag("a", True)


def test_the_baseline_survives_degenerate_terms(tmp_path):
    file = tmp_path / "gemm.csv"
    file.write_text(GEMM + GOOD * 3)
    (report,) = run(file).files
    assert read_table(file).columns[0] == "device"
    error, _ = baseline([*report.cases])
    assert error < 1e-6


def serving_row(**changes):
    cells = {"model": "qwen3-235b-a22b", "device": "h100-sxm", "backend": "vllm", "precision": "fp4", "tp": 64,
             "input_len": 512, "output_len": 16, "concurrency": 1, "ttft_s": 1, "tpot_s": 1}  # fmt: skip
    return {**cells, **changes}


def test_a_layer_divided_to_slivers_keeps_traffic_of_its_own():
    ttft, tpot, *alone = serving.cases(row(**serving_row()))
    assert 0 < tpot.predicted < ttft.predicted < 1
    assert [c.group.partition(", ")[2] for c in alone] == ["fields only"] * 2


def test_a_row_of_a_plan_that_cannot_be_is_skipped_with_its_reason(tmp_path):
    rows = [serving_row(ep=64), serving_row(ep=8), serving_row(model="llama3.1-70b", tp=8, ep=8)]
    file = tmp_path / "serving.csv"
    file.write_text("\n".join([",".join(rows[0]), *(",".join(map(str, r.values())) for r in rows)]))
    (report,) = run(file).files
    assert {c.line for c in report.cases} == {2}
    assert [s.line for s in report.skipped] == [3, 4]
    assert "8 ranks share the experts and 64 all else" in report.skipped[0].reason
    assert "no experts" in report.skipped[1].reason


def test_experts_on_ranks_of_their_own_are_predicted_so():
    divided, apart = (serving.experiment(row(**serving_row(tp=4, ep=ep))).plan for ep in (1, 4))
    assert not divided.has("expert_parallel")
    assert apart.option("expert_parallel", "degree") == 4


def test_every_row_is_exported_with_its_prediction(tmp_path):
    file = tmp_path / "gemm.csv"
    file.write_text(GEMM + GOOD + "no-such,bf16,1,1,1,1.0,test\n")
    report = run(file)
    rows = list(csv.DictReader(rows_csv(report, tmp_path / "rows.csv").open(encoding="utf-8")))
    assert [r["line"] for r in rows] == ["2", "3"]
    case = report.files[0].cases[0]
    assert float(rows[0]["predicted"]) == pytest.approx(case.predicted, rel=1e-5)
    assert float(rows[0]["low"]) < case.predicted < float(rows[0]["high"])
    assert float(rows[0]["error"]) == pytest.approx(case.predicted / 2e-5 - 1, abs=1e-4)
    assert "no-such" in rows[1]["skipped"]
    assert rows[1]["predicted"] == ""


def test_what_rows_do_not_state_is_said(tmp_path):
    """With what was taken for it, in the report and beside each row; what they state is not."""
    file = tmp_path / "training.csv"
    base = run_of(tokens_per_s_per_device=3000, tp="", precision="?", global_batch="").cells
    stated = {**base, "tp": "1", "precision": "bf16", "global_batch": "32"}
    file.write_text("\n".join([",".join(base), *(",".join(r.values()) for r in (base, stated))]))
    report = run(file)
    assert report.files[0].assumed() == {name: {value: 1} for name, value in (
        ("global_batch", "8"), ("precision", "bf16"), ("tp", "1"))}  # fmt: skip
    assert assumed_lines(report) == ["training.csv: not stated, and taken as: global_batch 8 (rows: 1);"
                                     " precision bf16 (rows: 1); tp 1 (rows: 1)"]  # fmt: skip
    rows = list(csv.DictReader(rows_csv(report, tmp_path / "rows.csv").open(encoding="utf-8")))
    assert {r["not_stated"] for r in rows if r["line"] == "2"} == {"global_batch=8; precision=bf16; tp=1"}
    assert {r["not_stated"] for r in rows if r["line"] == "3"} == {""}


def test_a_format_whose_column_is_missing_is_said(tmp_path):
    cells = {k: v for k, v in serving_row().items() if k not in ("precision", "backend")}
    file = tmp_path / "serving.csv"
    file.write_text("\n".join([",".join(cells), ",".join(map(str, cells.values()))]))
    assert {"precision", "backend"} <= set(run(file).files[0].assumed())


def test_the_worst_rows_are_different_ones(tmp_path):
    """Equal ones that were measured several times would crowd out the others."""
    file = tmp_path / "gemm.csv"
    others = "".join(f"h100-sxm,bf16,{m},4096,4096,5e-5,test\n" for m in (1, 8, 64, 128))
    file.write_text(GEMM + 9 * GOOD.replace("2e-5", "1e-3") + others)
    worst = run(file).files[0].worst
    assert len({c.label for c in worst}) == len(worst) == 5


def test_more_clients_than_anyone_measures_are_not_simulated():
    """A slip of the keyboard would take minutes."""
    with pytest.raises(BadCell, match="65536 clients are more than"):
        serving.cases(row(**serving_row(concurrency=65536)))
    with pytest.raises(BadCell, match=r"512 clients with 512 \+ 100000 tokens"):
        serving.cases(row(**serving_row(concurrency=512, output_len=100000)))


@pytest.mark.parametrize("cells", [{"layers": "1e9"}, {"seq_len": "1e9"}, {"n_devices": "1e9"}])
def test_numbers_that_no_run_has_are_refused_at_once(cells):
    """They used to be predicted, for minutes."""
    with pytest.raises(BadCell, match="is more than 1e"):
        training.cases(run_of(tokens_per_s_per_device=3000, **cells))


def test_prompts_longer_than_any_context_are_refused_at_once():
    cells = {"model": "llama3-8b", "device": "rtx3090", "backend": "llama.cpp", "tp": 1, "pp": 1, "batch": 1}
    with pytest.raises(BadCell, match="is more than 1e"):
        generation.cases(row(**cells, prompt_len="1e9", output_len=1, ttft_s=1, tpot_s=""))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_another_encoding_is_named_as_what_it_is(encoding, tmp_path):
    """It was said to be of an unknown schema, in characters that no terminal shows."""
    file = tmp_path / "gemm.csv"
    file.write_text(GEMM + GOOD, encoding=encoding)
    with pytest.raises(UserError, match="is not text in UTF-8"):
        read_table(file)


def test_an_unknown_name_lists_each_known_one_once():
    with pytest.raises(UserError) as failed:
        gemm.cases(row(device="zzzzzz", dtype="bf16", m=1, n=1, k=1, seconds=1))
    names = str(failed.value).partition("known: ")[2].partition(", …")[0].split(", ")
    assert len(names) == len({*names}) > 20
