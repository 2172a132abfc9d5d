"""Rows of measured fine-tuning runs become experiments with their method's adapters."""

import pytest

from ridgeline.spec.workload import FineTune
from ridgeline.validate import finetuning_rows as finetuning
from ridgeline.validate import training_rows as training
from ridgeline.validate.csv_table import BadCell, CsvRow, read_table
from ridgeline.validate.run import schema_of

ROW = {
    "family": "qwen2", "gated": "1", "layers": "24", "hidden": "2048", "heads": "16", "kv_heads": "16", "ffn": "5504",
    "vocab": "151936", "seq_len": "2048", "device": "a100-80g-sxm", "n_devices": "1", "global_batch": "8",
    "recompute": "full", "precision": "bf16", "flash": "1", "tokens_per_s_per_device": "9000", "method": "lora",
    "weights": "bf16", "optimizer": "adamw", "lora_rank": "64", "micro_batch_size": "1",
    "lora_targets": "qkv,o,gate,up,down",
}  # fmt: skip


def row(**changes):
    return CsvRow(2, {**ROW, **{k: str(v) for k, v in changes.items()}})


def test_a_file_of_them_is_recognized(tmp_path):
    path = tmp_path / "finetuning.csv"
    path.write_text(f"{','.join(ROW)}\n" + ",".join(f'"{v}"' for v in ROW.values()) + "\n")
    assert schema_of(read_table(path)) is finetuning


@pytest.mark.parametrize(
    ("changes", "plan"),
    [
        ({}, ["lora:rank=64,targets=q_proj+k_proj+v_proj+o_proj+gate_proj+up_proj+down_proj"]),
        ({"lora_targets": "", "lora_rank": "?"}, ["lora"]),
        ({"method": "qlora", "weights": "int4", "lora_targets": "qkv"}, ["qlora:rank=64,targets=q_proj+k_proj+v_proj"]),
        ({"method": "full"}, []),
    ],
)
def test_methods(changes, plan):
    changed = row(**changes)
    adapters = finetuning._adapters(changed, changed.text("method"))
    assert adapters == plan
    run = CsvRow(2, {**changed.cells, "micro_batch": "1"})
    e, chosen = training.settled(run, FineTune, adapters)
    assert (e.task, e.micro_batch_size, e.accumulation, chosen) == ("finetune", 1, 8, "")
    (case,) = finetuning.cases(changed)
    assert case.predicted > 0
    assert case.group.endswith(changed.text("method"))


def test_lora_is_faster_than_qlora_and_what_is_no_method():
    speed = {m: finetuning.cases(row(method=m, seq_len=8192))[0].predicted for m in ("lora", "qlora")}
    assert speed["lora"] > speed["qlora"]
    with pytest.raises(BadCell, match="none of full, lora, qlora"):
        finetuning.cases(row(method="prompt"))


def test_what_is_taken_for_empty_cells_is_said():
    r = row(tp="", pp="?", zero_stage="", micro_batch_size="", global_batch="")
    finetuning.cases(r)
    names = ("tp", "pp", "zero_stage", "micro_batch_size", "global_batch")
    assert {name: r.assumed[name] for name in names} == {**dict.fromkeys(names, "1"), "zero_stage": "0"}
    assert "micro_batch" not in r.assumed
    r = row(micro_batch_size="?")
    (case,) = finetuning.cases(r)  # of 1 to 8
    assert f"micro_batch={r.assumed['micro_batch_size']}" in case.label
