"""Experiments: identity, files, overrides, and what a mistake in a file gets."""

import os
import subprocess
import sys

import pytest
import tomli_w

from ridgeline import experiments
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.spec.workload import WORKLOADS

MODEL = "llama-tiny"
TRAIN = {"kind": "pretrain", "seq_len": 64, "batch_size": 4}


def make(model=MODEL, on="2xa100", workload=TRAIN, plan=(), name=""):
    return experiments.make(model, on, workload, list(plan), name)


def write(path, **table):
    path.write_text(tomli_w.dumps(table))
    return path


@pytest.fixture
def file(tmp_path):
    def _file(**changes):
        table = {"model": MODEL, "on": "2xa100", "workload": dict(TRAIN), "plan": [], **changes}
        return write(tmp_path / "e.toml", **{k: v for k, v in table.items() if v is not None})

    return _file


# ---- identity -------------------------------------------------------------------------------------------------------


def test_id_is_the_same_in_every_process():
    code = f"from ridgeline import experiments as x; print(x.make({MODEL!r}, '2xa100', {TRAIN!r}, ['zero', 'lora']).id)"
    here = make(plan=["zero", "lora"]).id
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == here
    assert len(here) == 12


def test_id_does_not_depend_on_order_spelling_or_label():
    plain = make(plan=["recompute", "zero", "flash_attention"])
    assert plain.id == make(plan=["flash_attention", "zero", "recompute"]).id
    assert plain.id == make(plan=["zero:stage=2", "recompute:policy=full,every=1", "flash_attention"]).id
    assert plain.id == make(plan=["zero", "recompute", "flash_attention"], name="a label").id
    assert make().id == make(plan=["data_parallel"]).id  # several ranks without a plan: PyTorch's convention
    assert make().id == make(workload={**TRAIN, "lr": 3e-4, "data": "stdlib"}).id
    assert make().id == make(on="2xa100-80g-sxm").id  # an alias


CHANGES = [
    {"model": "llama-mini"},
    {"model": {"base": MODEL, "num_layers": 3}},
    {"model": {"base": MODEL, "rope_theta": 1e6}},
    {"on": "4xa100"},
    {"on": "2x2xa100"},
    {"on": "2xa800-80g"},
    {"plan": ["zero"]},
    {"plan": ["zero:stage=3"]},
    {"plan": ["recompute"]},
    *({"workload": {**TRAIN, **change}} for change in (
        {"kind": "finetune"}, {"seq_len": 65}, {"batch_size": 8}, {"micro_batch_size": 1}, {"steps": 21}, {"lr": 1e-3},
        {"min_lr_ratio": 0.2}, {"warmup_steps": 3}, {"weight_decay": 0.0}, {"beta1": 0.8}, {"beta2": 0.99},
        {"grad_clip": 0.0}, {"optimizer": "sgd"}, {"seed": 1}, {"data": "x"}, {"checkpoint": "x"}, {"tokenizer": "x"},
        {"dtype": "bf16"}, {"document_mask": True}, {"eval_batches": 2},
        {"kernels": {"norm": "liger"}},
    )),
]  # fmt: skip


def test_id_changes_with_every_field():
    ids = [make().id] + [make(**change).id for change in CHANGES]
    assert len(set(ids)) == len(ids)
    fields = set(WORKLOADS["pretrain"].model_fields)
    assert fields == {key for change in CHANGES for key in change.get("workload", {})}  # none forgotten


def test_the_id_of_a_copy_is_its_own():
    e, other = make(), make(workload={**TRAIN, "lr": 1e-5})
    assert e.id != other.id
    assert e.model_copy(update={"workload": other.workload}).id == other.id
    assert e.model_copy(update={"name": "a label"}).id == e.id


def test_derived_sizes():
    e = make(on="2x2xa100", workload={**TRAIN, "batch_size": 16, "micro_batch_size": 2})
    assert (e.world, e.data_parallel, e.batch_size, e.micro_batch_size, e.accumulation) == (4, 4, 16, 2, 2)
    e = make(on="4xa100", workload={"kind": "pretrain", "seq_len": 64})
    assert (e.batch_size, e.micro_batch_size, e.accumulation) == (4, 1, 1)
    generate = {"kind": "generate", "prompt_len": 8, "output_len": 8}
    assert [make(on=on, workload=generate).dtype for on in ("a100", "xeon")] == ["bf16", "fp32"]


# ---- files ----------------------------------------------------------------------------------------------------------

TASKS = {
    "pretrain": ({**TRAIN, "lr": 1e-5}, ["zero:stage=3", "recompute:every=2", "lora:rank=4,targets=o_proj"]),
    "finetune": ({**TRAIN, "kind": "finetune", "checkpoint": "dir"}, ["lora:targets=q_proj+up_proj", "rtn:bits=4"]),
    "generate": ({"kind": "generate", "prompt_len": 9, "output_len": 5, "batch_size": 2}, ["rtn", "flash_attention"]),
    "compress": ({"kind": "compress", "samples": 9, "seq_len": 64, "eval_data": "text"}, ["gptq:bits=3,group_size=32"]),
    "serve": ({"kind": "serve", "rate": 2.5, "requests": 7}, ["flash_attention"]),
}


@pytest.mark.parametrize("task", WORKLOADS)
@pytest.mark.parametrize("model", [MODEL, {"base": MODEL, "num_layers": 2}, "qwen3-32b", "llama3.1-8b"], ids=str)
def test_toml_round_trip(tmp_path, task, model):
    workload, plan = TASKS[task]
    e = make(model, "2x2xa100", workload, plan, name=f"my {task}")
    file = tmp_path / "e.toml"
    file.write_text(experiments.to_toml(e))
    again = experiments.load(file)
    assert again == e
    assert again.id == e.id
    assert experiments.to_toml(again) == experiments.to_toml(e)


def test_overrides(file):
    path = file()

    def load(*overrides):
        return experiments.load(path, list(overrides))

    assert load("workload.steps=40", "workload.lr=1e-4").training.steps == 40
    assert load("workload.seq_len=1k").training.seq_len == 1024
    assert load("on=4xa100").cluster.label == "4xa100-80g-sxm"
    assert load('plan=["zero:stage=3", "recompute"]').plan.has("zero")
    assert load("workload.data=some/dir").training.data == "some/dir"
    assert load("model=gpt2-tiny").model.family == "gpt2"
    # Fields of a model that the file only names.
    two = load("model.num_layers=2", "model.vocab_size=512")
    assert (two.model.num_layers, two.model.vocab_size, two.model.hidden_size) == (2, 512, 192)
    assert two.model.name == "llama-tiny*"
    assert two.model.published_parameters is None
    assert load("model.num_layers=2", "model.name=mine").model.name == "mine"
    # What the file says stays where it is not overridden.
    assert load("workload.steps=40").training.seq_len == 64


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("steps", "'steps' is not key=value"),
        ("=4", "'=4' is not key=value"),
        ("workload.stepz=4", "did you mean 'steps'"),
        ("modle=gpt2", "did you mean 'model'"),
        ("model.layers=4", "did you mean 'num_layers'"),
        ("on.x=3", "on is not a table"),
        ("name.x=3", "name is not a table|is not a string"),
        ("model.num_layers=two", "num_layers = 'two' is not valid"),
        ("workload.seq_len=2048", "longer than the 1024 positions"),
        ("plan=zero", "not a list of techniques"),
    ],
)
def test_bad_override(file, override, says):
    with pytest.raises(UserError, match=says):
        experiments.load(file(), [override])


BAD_TABLES = [
    ({"modle": "x"}, ["unknown key 'modle'", "e.toml", "'model'"]),
    ({"workload": {**TRAIN, "seqlen": 4}}, ["unknown key 'seqlen'", "[workload]", "'seq_len'"]),
    ({"workload": {**TRAIN, "kind": "pretrian"}}, ["unknown task 'pretrian'", "'pretrain'"]),
    ({"workload": {**TRAIN, "kind": ["pretrain"]}}, ["unknown task"]),
    ({"workload": 3}, ["workload is not a table"]),
    ({"workload": {**TRAIN, "seq_len": "long"}}, ["seq_len = 'long' is not valid"]),
    ({"workload": {**TRAIN, "batch_size": 0}}, ["batch_size = 0 is not valid"]),
    ({"workload": {**TRAIN, "lr": -1.0}}, ["lr = -1.0 is not valid"]),
    ({"workload": {**TRAIN, "lr": float("inf")}}, ["lr = inf is not valid"]),
    ({"workload": {**TRAIN, "dtype": "fp8"}}, ["dtype = 'fp8' is not valid", "bf16"]),
    ({"model": None}, ["no model", "llama-tiny"]),
    ({"model": 3}, ["model = 3 is neither a name nor a table"]),
    ({"model": "lama-tiny"}, ["unknown model 'lama-tiny'", "'llama-tiny'"]),
    ({"model": {"base": 3}}, ["base = 3 is not a model's name"]),
    ({"model": {"base": MODEL, "hiden_size": 3}}, ["unknown key 'hiden_size'", "[model]", "'hidden_size'"]),
    ({"model": {"base": MODEL, "num_kv_heads": 4}}, ["num_heads 6 is not a multiple of num_kv_heads 4"]),
    ({"model": {"num_layers": 2}}, ["[model]", "family is not valid"]),
    ({"on": "2xa1000"}, ["unknown device 'a1000'", "'a100'"]),
    ({"on": "0xa100"}, ["'0xa100' has no devices"]),
    ({"on": 3}, ["on = 3 is not a string"]),
    ({"on": "local"}, ["no profile of this machine yet", "ridgeline probe"]),
    ({"name": 3}, ["name = 3 is not a string"]),
    ({"plan": "zero"}, ["plan = 'zero' is not a list", 'plan = ["zero"]']),
    ({"plan": ["zerro"]}, ["unknown technique 'zerro'", "'zero'"]),
    ({"plan": ["zero:stge=3"]}, ["unknown option 'stge' in technique 'zero'", "'stage'"]),
    ({"plan": ["zero:stage=4"]}, ["technique 'zero': stage = 4 is not valid", "ridgeline techniques zero"]),
    ({"plans": {"a": []}}, ["holds several plans (a)", "--plan"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), BAD_TABLES, ids=lambda x: str(x)[:40])
def test_bad_file(file, change, says):
    with pytest.raises(UserError) as caught:
        experiments.load(file(**change))
    for text in says:
        assert text in str(caught.value)


BAD_ABLATIONS = [
    ({"plans": 3}, ["[plans] is empty"]),
    ({"plans": {}}, ["[plans] is empty"]),
    ({"plans": {"a": 3}}, ["[plans] a", "not a list of techniques"]),
    ({"plans": {"a": {"wiht": []}}}, ["unknown key 'wiht'", "[plans] a", "'with'"]),
    ({"plans": {"a": {"with": "zero"}}}, ["not a list of techniques"]),
    ({"plans": {"a": {"on": 3}}}, ["on = 3 is not a string"]),
    ({"plans": {"a": ["zerro"]}}, ["unknown technique 'zerro'"]),
    ({"plans": {"a": []}, "measure": {"repeat": 3}}, ["unknown key 'repeat'", "[measure]", "'repeats'"]),
    ({"plans": {"a": []}, "measure": {"repeats": 0}}, ["repeats = 0 is not valid"]),
    ({"plans": {"a": []}, "measure": 3}, ["measure is not a table"]),
    ({"plans": {"one": []}, "measure": {"baseline": "ome"}}, ["unknown baseline plan 'ome'", "'one'"]),
]


@pytest.mark.parametrize(("change", "says"), BAD_ABLATIONS, ids=lambda x: str(x)[:40])
def test_bad_ablation(file, change, says):
    with pytest.raises(UserError) as caught:
        experiments.load_ablation(file(plan=None, **change))
    for text in says:
        assert text in str(caught.value)


def test_ablation_plans_in_file_order(file):
    plans = {"base": {"with": []}, "z": {"with": ["zero"], "on": "4xa100"}, "a": {"with": ["recompute"]}}
    path = file(plan=None, plans=plans, name="mine", measure={"repeats": 3})
    spec = experiments.load_ablation(path, ["workload.steps=7"])
    assert list(spec.plans) == ["base", "z", "a"]
    assert (spec.name, spec.baseline, spec.measure.repeats) == ("mine", "base", 3)
    assert [e.world for e in spec.plans.values()] == [2, 4, 2]
    assert {e.training.steps for e in spec.plans.values()} == {7}
    assert experiments.load_plan(path, "z").cluster.size == 4
    with pytest.raises(UserError, match="unknown plan 'zz'"):
        experiments.load_plan(path, "zz")
    assert list(experiments.load_ablation(file(plan=["zero"])).plans) == ["baseline", "plan"]


@pytest.mark.parametrize(
    ("text", "says"),
    [(b"model = ", "not valid TOML"), (b"\xff\xfe", "not valid TOML"), (b"[workload\n", "not valid TOML")],
)  # fmt: skip
def test_not_toml(tmp_path, text, says):
    (tmp_path / "e.toml").write_bytes(text)
    with pytest.raises(UserError, match=says):
        experiments.load(tmp_path / "e.toml")


def test_no_file(tmp_path):
    with pytest.raises(UserError, match="no experiment file at"):
        experiments.load(tmp_path / "none.toml")
    with pytest.raises(UserError, match="no experiment file at"):
        experiments.load(tmp_path)


def test_a_plan_that_cannot_work_names_its_mend(file):
    with pytest.raises(Incompatible, match="only 1 process") as caught:
        experiments.load(file(on="a100", plan=["zero"]))
    assert "--on 2xa100-80g-sxm" in caught.value.fix
