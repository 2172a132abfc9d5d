"""Steps on a fake GPU: launches and waits have budgets, and nothing is on the wrong device."""

from itertools import product

import pytest
import torch
from tests.compressing import checkpoint, squeeze

from ridgeline import catalog
from ridgeline.experiments import make
from ridgeline.graph import training_graph
from ridgeline.measure.fake.trace import trace
from ridgeline.predict.common import rewritten
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Plan
from ridgeline.spec.workload import Serve
from ridgeline.techniques.registry import default_plan, registry, require_runnable, resolve

LOW = ["mixed_precision", "flash_attention", "fused_layers"]


def shallow(name):
    """The model with two layers."""
    return catalog.model(name).model_copy(update={"num_layers": 2})


def training(model, plan, text, documents=False, **changes):
    workload = {"kind": "pretrain", "seq_len": 64, "batch_size": 4, "steps": 4, "data": str(text),
                "document_mask": documents}  # fmt: skip
    return make(shallow(model).model_copy(update=changes), "h100-sxm", workload, plan)


def serving(model, *plan, on="h100-sxm", **fields):
    workload = Serve(prompt_len=8, output_len=8, dtype="bf16", max_model_len=256, **fields)
    return Experiment(model=shallow(model), cluster=catalog.cluster(on), workload=workload,
                      plan=Plan.parse([*default_plan("serve"), *plan]))  # fmt: skip


BUDGETS = {
    "train": ("llama-mini", LOW, {"step": 130}),
    "train fp8": ("llama-mini", [*LOW, "fp8"], {"step": 153}),
    "train fp8 rowwise": ("llama-mini", [*LOW, "fp8:scaling=rowwise"], {"step": 183}),
    "train adamw8bit": ("llama-mini", [*LOW, "adamw8bit"], {"step": 147}),
    "train adalomo": ("llama-mini", [*LOW, "adalomo"], {"step": 218}),
    "train diff_pruning": ("llama-mini", [*LOW, "diff_pruning"], {"step": 236}),
    "train qlora": ("llama-mini", [*LOW, "qlora"], {"step": 359}),
    "train qft": ("llama-mini", ["flash_attention", "qft"], {"step": 356}),
    "train fp16": ("llama-mini", ["mixed_precision:dtype=fp16", *LOW[1:]], {"step": 130}),
    "train moe": ("mixtral-tiny", LOW, {"step": 250}),
    "serve": ("llama-mini", [], {"prefill": (19, 24), "decode": (17, 24)}),
    "serve int4 cache": ("llama-mini", ["kv_quant:dtype=int4"], {"prefill": (19, 24), "decode": (17, 24)}),
    "serve int4": ("llama-mini", ["rtn:bits=4,group_size=64"], {"prefill": (19, 32), "decode": (17, 25)}),
    "serve mxfp4": ("llama-mini", ["mxfp4:layers=all"], {"prefill": (19, 32), "decode": (17, 25)}),
    "serve fp8": ("llama-mini", ["fp8"], {"prefill": (19, 31), "decode": (17, 25)}),
    "serve adapters": ("llama-mini", ["multi_adapter:adapters=4"], {"prefill": (19, 42), "decode": (17, 40)}),
    "serve adapters int4": (
        "llama-mini",
        ["multi_adapter:adapters=4,rank=20", "rtn:bits=4,group_size=64"],
        {"prefill": (19, 48), "decode": (17, 41)},
    ),
    "serve adapters fp8": ("llama-mini", ["multi_adapter:adapters=4", "fp8"], {"decode": (17, 41)}),
    "serve moe": ("mixtral-tiny", [], {"prefill": (19, 64), "decode": (17, 64)}),
    "serve moe mxfp4": ("mixtral-tiny", ["mxfp4"], {"decode": (17, 60)}),
}
"""Model (two layers of it), plan, and most launches of each step: an addition of some per cent is to be noticed. Steps
of serving are captured as CUDA graphs: most launches, of which the graph is one, and most kernels of the graph."""


MASKED = {
    "documents": ((True,), {}),
    "windows": ((), {"sliding_window": 16}),
    "documents and windows": ((True,), {"sliding_window": 16}),
}
"""Training with masks: whether documents are separate, and changes of the model."""
OWN = {
    "soft caps, windows, documents": ((True,), {"attention_soft_cap": 50.0, "sliding_window": 16, "window_every": 2}),
    "ALiBi": ((), {"position": "alibi"}),
    "chunks": ((), {"sliding_window": 16, "chunked_window": True}),
}
"""The same of what PyTorch's flash kernel does not have."""
EXPERTS = ("mxfp4", "rtn:bits=4,group_size=32", "fp8")
ON_RANKS = ("serve", "serve int4", "serve fp8", "serve moe")
SAMPLED = {
    "filters": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalties": {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    "tokens": {"temperature": 0.8, "allowed_token_ids": [5, 6, 7], "bad_words": [[6]], "min_tokens": 3},
    "log-probabilities": {"temperature": 0.0, "logprobs": 5},
    "named tokens' log-probabilities": {"temperature": 0.0, "logprobs": 0, "logprob_token_ids": [3, 9]},
    "prompts' log-probabilities": {"temperature": 0.0, "prompt_logprobs": 3},
    "drafts": {"temperature": 0.8},
    "drafts' log-probabilities": {"temperature": 0.8, "logprobs": 2},
}
"""How tokens are chosen."""


@pytest.fixture(scope="module")
def traced(once, tmp_path_factory):
    """Each of them, traced once; skipped, with the reason, where a fake GPU cannot be had."""
    text = tmp_path_factory.mktemp("traced") / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 400)
    given = {n: training(m, p, text) if n.startswith("train") else serving(m, *p) for n, (m, p, _) in BUDGETS.items()}
    masked = MASKED | OWN
    given |= {n: training("llama-mini", LOW, text, *more, **changes) for n, (more, changes) in masked.items()}
    given |= {f"sequences {n}": serving("llama-mini", max_num_seqs=n) for n in (1, 2)}
    given["one sequence fp8"] = serving("llama-mini", "fp8", max_num_seqs=1)
    given |= {f"{n} on two ranks": serving(m, *p, "tensor_parallel:degree=2", on="2xh100-sxm")
              for n, (m, p, _) in BUDGETS.items() if n in ON_RANKS}  # fmt: skip
    given["own products"] = serving("llama-mini", kernels={"dense": "ridgeline"})
    given |= {name: serving("llama-mini", *["speculative"] * name.startswith("drafts")) for name in SAMPLED}
    plain, coded = saved(tmp_path_factory.mktemp("saved"))
    given["served checkpoint"] = serving("llama-mini", checkpoint=str(plain))
    given["served int4 checkpoint"] = serving("llama-mini", checkpoint=str(coded))
    given["tuned checkpoint"] = make(str(plain), "h100-sxm", {"kind": "finetune", "seq_len": 64, "batch_size": 4,
                                     "steps": 4, "data": str(text)}, LOW)  # fmt: skip
    given["drafts by a model"] = serving("llama-mini", f"speculative:draft={plain},tokens=4")
    given["compress"] = make("llama-mini", "h100-sxm", {"kind": "compress", "seq_len": 64},
                             ["wanda", "rtn:bits=4,group_size=64"])  # fmt: skip
    batches = {}
    for n, on in product((4, 64), ("h100-sxm", "a100-80g-sxm")):
        given[f"{n} on {on}"], batches[f"{n} on {on}"] = serving("llama-mini", "fp8", on=on), n
    for n, plan in product((1, 4, 64), EXPERTS):
        given[f"{n} through {plan}"], batches[f"{n} through {plan}"] = serving("mixtral-tiny", plan), n
    settings = [SAMPLED.get(name, {"temperature": 0.0}) for name in given]
    sequences = [batches.get(name, 8) for name in given]
    return once("traced", lambda: dict(zip(given, traces(list(given.values()), settings, sequences), strict=True)))


def saved(folder):
    """Checkpoints of the model, in bf16 and with weights of 4 bits."""
    plain, coded = folder / "plain", folder / "coded"
    checkpoint(plain, shallow("llama-mini").model_dump(), dtype=torch.bfloat16)
    squeeze(plain, coded, "rtn:bits=4,group_size=64", form="compressed-tensors")
    return plain, coded


def traces(experiments, settings=(), sequences=()):
    """Their traces, where a fake GPU can be had."""
    try:
        return trace(experiments, settings, sequences)
    except UserError as e:
        for reason in ("this PyTorch is built with CUDA", "needs a C++ compiler"):
            if reason in str(e):
                pytest.skip(f"not traced: {str(e).partition('fake GPU')[2].lstrip(': ')}")
        raise


@pytest.mark.parametrize("name", BUDGETS)
def test_budgets(traced, name):
    for step, budget in BUDGETS[name][2].items():
        found = traced[name][step]
        most, kernels = budget if isinstance(budget, tuple) else (budget, 0)
        assert (found.replayed > 0, found.replayed <= kernels) == (kernels > 0, True)
        assert not found.wrong
        assert 0 < found.launches <= most
        # For the loss, or the tokens of the step before, which the first step does not have.
        assert found.waited == (step != "prefill"), found.waits
        # While the GPU does the next step; with fp16 the host has to know before the update whether there is one.
        assert (found.behind > 0) == (found.waited > 0 and name != "train fp16")


UPDATES = {
    "adamw8bit": {"coded_adamw": 15, "_fused_adamw_": 2},  # those that are coded, and others in each of two groups
    "adalomo": {"sum_squares": 16, "average": 16, "sizes": 16, "update_matrix": 16, "update_vector": 5},
    "diff_pruning": {"gated_weight": 25, "gated_gradients": 14, "shut_gates": 14},
    "qlora": {"expand_nf4": 25},
    "qft": {"expand_rows": 31, "lion_rows": 16},
}
"""Kernels of optimizers and of weights that are made at every use, forward and, but for those of the first layer that
need no gradient of their input, backward."""


@pytest.mark.parametrize("name", UPDATES)
def test_a_tensor_is_updated_or_made_by_few_kernels(traced, name):
    found = traced[f"train {name}"]["step"].operators
    assert {n: found.get(n) for n in UPDATES[name]} == UPDATES[name]
    assert not {"index_select", "logit_", "lerp_", "floor_", "rsqrt", "__rshift__"} & {*found}


def test_a_users_checkpoint_is_traced(traced):
    for name, same in (("served checkpoint", "serve"), ("tuned checkpoint", "train"),
                       ("served int4 checkpoint", "serve int4")):  # fmt: skip
        for step, found in traced[name].items():
            assert (found.operators, found.kernels, found.wrong) == (
                traced[same][step].operators, traced[same][step].kernels, [],
            )  # fmt: skip


def test_a_model_drafts_by_graphs_and_one_wait(traced):
    """Four passes after one another and the one that checks: 91 launches and nine waits where each was apart."""
    found = traced["drafts by a model"]["decode"]
    assert not found.wrong
    assert found.operators["graph replay"] == 5
    assert found.launches <= 46
    assert found.waited == 2


@pytest.mark.parametrize("scaling", ["tensor", "rowwise"])
def test_predicted_casts_to_fp8_are_those_that_are_launched(traced, scaling):
    name = "train fp8" + " rowwise" * (scaling == "rowwise")
    e = make(shallow("llama-mini"), "h100-sxm", {"kind": "pretrain", "seq_len": 64, "batch_size": 4, "steps": 4},
             [*LOW, f"fp8:scaling={scaling}"])  # fmt: skip
    e, techniques = resolve(e)
    g = rewritten(training_graph(e), e, techniques)
    casts = [(op.pieces, b.repeat) for b in g.blocks for op in (*b.forward, *b.backward)
             if op.kind == "cast" and op.name.endswith(("quantize", "encode_weight", "peaks"))]  # fmt: skip
    found = traced[name]["step"].operators
    # That of gated gradients, which finds peaks, is predicted as the activation's backward pass, which it is.
    encoded = {n: count for n, count in found.items() if n.startswith(("peaks", "encode")) and n != "peaks_of_gated"}
    assert sum(pieces * repeat for pieces, repeat in casts) == sum(encoded.values()) == 36
    assert found["encode_gated"] == found["peaks_of_gated"] == 2
    assert found["_scaled_mm"] == 24


@pytest.mark.parametrize("name", [name for name in BUDGETS if name.startswith("serve")])
def test_a_gpu_has_the_next_step_while_the_host_waits_for_tokens(traced, name):
    found = traced[name]["decode"]
    assert found.launches <= found.behind + 1  # all of it but the numbers that went ahead


@pytest.mark.parametrize("name", ["serve adapters", "serve adapters int4", "serve adapters fp8"])
def test_adapters_are_two_kernels_behind_each_merged_product(traced, name):
    """However many there are, of four products of each of two layers; all else is as without them."""
    step = traced[name]["decode"]
    assert step.kernels["lora_shrink"] == step.kernels["lora_expand"] == 8
    base = traced[name.replace(" adapters", "")]["decode"]
    assert step.replayed == base.replayed + 16
    assert step.launches == base.launches


@pytest.mark.parametrize("name", ON_RANKS)
def test_a_rank_replays_its_part_with_two_sums_a_layer(traced, name):
    """Kernel by kernel what one GPU does, and the sums, none of which the host launches. Its steps are not launched
    ahead: each waits for its own tokens."""
    for step in ("prefill", "decode"):
        found, whole = traced[f"{name} on two ranks"][step], traced[name][step]
        assert found.kernels == whole.kernels | {"allreduce_": 2 * 2}
        assert "allreduce_" not in found.operators
        assert found.launches <= whole.launches
        assert not found.wrong
        assert found.waited == 1


def test_one_sequence_is_multiplied_by_the_kernel_for_one_row(traced):
    """Four products of each of two layers in the graph, SwiGLU within one of them, and the head; of two sequences
    none."""
    one, two = (traced[f"sequences {n}"]["decode"] for n in (1, 2))
    assert (one.kernels["product_of_row"], one.operators["product_of_row"]) == (8, 1)
    assert not {"mm", "addmm"} & {*one.kernels, *one.operators}
    assert "product_of_row" not in {*two.kernels, *two.operators}
    assert not one.wrong
    assert "activation" not in one.kernels
    assert two.kernels["activation"] == 2
    assert (one.launches, one.replayed + 2) == (two.launches, two.replayed)


def test_products_of_a_few_rows_are_ours_where_they_are_asked_for(traced):
    """As many launches, and no kernel of a library between those that start early. Counters of merged weights, which
    have no addresses here by which they would be remembered, are made anew."""
    ours, plain = (traced[name]["decode"] for name in ("own products", "serve"))
    assert (ours.kernels["product_of_rows"], ours.operators["product_of_rows"]) == (8, 1)
    assert not {"mm", "addmm", "linear"} & {*ours.kernels, *ours.operators}
    assert (ours.launches, ours.replayed - ours.kernels["zeros"]) == (plain.launches, plain.replayed)
    assert not ours.wrong


def test_few_rows_of_float8_weights_take_the_kernels_of_16_bits(traced):
    """Inputs are not rounded, and products are ours: of one sequence those of 16 bits themselves."""
    few, plain = traced["serve fp8"]["decode"], traced["serve"]["decode"]
    assert (few.kernels["few"], few.replayed) == (8, plain.replayed)
    one, wide = traced["one sequence fp8"]["decode"], traced["sequences 1"]["decode"]
    assert one.kernels == wide.kernels
    assert not one.wrong


@pytest.mark.parametrize(("sequences", "with_units"), [(4, ("few", 24)), (64, ("product_of_rows", 32))])
def test_float8_weights_as_the_device_can(traced, sequences, with_units):
    """On an H100 inputs of many rows are cast, once for each product, which is PyTorch's for prompts; on an A100 as
    many as a decode step has are multiplied by codes, and prompts by weights that are expanded first."""
    hopper, ampere = (traced[f"{sequences} on {on}"] for on in ("h100-sxm", "a100-80g-sxm"))
    kernel, replayed = with_units
    assert hopper["prefill"].kernels["_scaled_mm"] == 8
    step = hopper["decode"]
    assert (step.kernels[kernel], step.kernels.get("encode_rows", 0), step.replayed) == (8, replayed - 24, replayed)
    step, prompts = ampere["decode"], ampere["prefill"]
    assert (step.kernels["few" if sequences == 4 else "tiles"], step.replayed) == (8, 24)
    assert (prompts.kernels["expand"], prompts.kernels["linear"]) == (8, 8)
    assert not any(s.wrong for found in (hopper, ampere) for s in found.values())


@pytest.mark.parametrize("sequences", [1, 4, 64])
def test_experts_in_codes_are_one_product_each_that_waits_for_nothing(traced, sequences):
    """Gate and up projection of all experts, and the last ones: in MXFP4, int4 and fp8. More rows than codes are
    multiplied for (64 prompts; of fp8, where the device multiplies it, 64 sequences) go expert by expert."""
    for plan in EXPERTS:
        found = traced[f"{sequences} through {plan}"]
        step, prompts = found["decode"], found["prefill"]
        assert step.wrong == prompts.wrong == []
        if plan == "fp8" and sequences == 64:
            assert not step.replayed
            continue
        assert step.kernels["tiles"] >= 2 * 2
        assert step.waited == 1  # for the tokens of the step before
        if sequences == 64:
            assert not prompts.replayed
            assert prompts.operators["expand"] >= 2 * 4 * 2


def test_filters_of_a_whole_batch_wait_once(traced):
    """The answer that stands for data says that every nucleus is larger than its candidates, as in the steps before."""
    found = traced["filters"]["decode"]
    assert not found.wrong
    assert found.operators["sort"] >= 2
    assert found.waited == 1, found.waits


@pytest.mark.parametrize(("name", "most"), [("penalties", 62), ("tokens", 62)])
def test_what_requests_change_about_logits_is_launched_once_for_all_of_them(traced, name, most):
    """Not sequence by sequence, of which there are eight."""
    found = traced[name]["decode"]
    assert not found.wrong
    assert found.waited == 1, found.waits
    assert found.launches <= most


@pytest.mark.parametrize("name", ["log-probabilities", "named tokens' log-probabilities"])
def test_log_probabilities_come_with_the_tokens(traced, name):
    step = traced[name]["decode"]
    assert not step.wrong
    assert step.waited == 1, step.waits


def test_log_probabilities_of_all_prompts_come_with_the_tokens(traced):
    prompts = traced["prompts' log-probabilities"]["prefill"]
    assert not prompts.wrong
    assert prompts.waited == 1, prompts.waits


@pytest.mark.parametrize("name", ["drafts", "drafts' log-probabilities"])
def test_all_drafted_places_are_one_copy(traced, name):
    """Of each sequence several, whose tokens agree."""
    step = traced[name]["decode"]
    assert not step.wrong
    assert step.waited == 1, step.waits


@pytest.mark.parametrize("name", MASKED)
def test_documents_and_windows_are_one_kernel_without_a_mask(traced, name):
    """No bias is made, and the host neither asks where documents end nor waits for copies."""
    found, plain = traced[name]["step"], traced["train"]["step"]
    assert not found.wrong
    assert found.waited == 1, found.waits
    assert {n: count for n, count in found.operators.items() if "attention" in n} == {
        "_flash_attention_forward": 2, "_flash_attention_backward": 2,
    }  # fmt: skip
    assert not {"masked_fill", "masked_fill_", "where"} & set(found.operators)
    assert found.launches <= plain.launches + ("documents" in name) * 13  # rotary tables of places within documents


@pytest.mark.parametrize("name", OWN)
def test_what_pytorch_does_not_have_is_our_kernel_without_a_mask(traced, name):
    """Nothing is as large as a row's scores: spans of tokens, once for all layers of a kind, are all that is made."""
    found, plain = traced[name]["step"], traced["train"]["step"]
    assert not found.wrong
    assert found.waited == 1, found.waits
    ours = {"attend_spans": 2, "queries_backward": 2, "keys_backward": 2}
    assert {n: found.operators[n] for n in ours} == ours
    assert not [n for n in found.operators if "attention" in n or n in ("bmm", "tanh", "_softmax", "masked_fill_")]
    kinds = 2 if "soft caps" in name else 1  # layers with windows and others
    assert found.launches <= plain.launches + kinds * (16 + 13 * ("documents" in name))


def test_sites_are_solved_on_the_device(traced):
    found = traced["compress"]["site"]
    assert not found.wrong
    assert found.launches > 20


UNTRACED = {
    "dynamic_batch_loading": "needs data of several domains",
    "moe_offload": "copies on a stream of its own, which a fake GPU does not have",
    "torch_compile": "what is compiled cannot be traced",
    "zero_inference": "as moe_offload",
}
OPTIONS = {"mxfp4": "mxfp4:layers=all"}
OPTIONS |= {name: f"{name}:group_size=64" for name in ("awq", "fptq", "gptq", "quantease")}
"""What this model needs: its rows have 320 inputs."""
MOST = {"train": 300, "serve": 65}
"""Launches of a step with two layers."""
COSTLY = {"alpha_tuning": 700, "qft": 320, "qlora": 360}
"""Of training with these, whose products are not merged; weights of the first take some of PyTorch's operators each."""
WAITS = {"swap_advisor": 4, "zero_offload": 8, "zero_infinity": 10}
"""More than one: for gradients that the host applies, and for what moves to the host."""


@pytest.mark.nightly
def test_every_technique_keeps_its_tensors_on_the_device_and_its_budgets(tmp_path):
    """Training and serving with each technique that one GPU and this model can have."""
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 400)
    found = {}
    for name, technique in registry().items():
        for task in technique.card.tasks & {"pretrain", "finetune", "serve"} if name not in UNTRACED else ():
            try:
                if task == "serve":
                    e = serving("llama-mini", *([] if name in default_plan("serve") else [OPTIONS.get(name, name)]))
                else:
                    e = training("llama-mini", [*(t for t in LOW if t != name), name], text)
                    work = {**e.workload.model_dump(exclude_unset=True), "kind": task}
                    e = make(e.model, "h100-sxm", work, e.plan.strings())
                require_runnable(resolve(e)[0])
            except UserError:
                continue
            found[name, task] = e
    assert len(found) > 50
    for (name, task), steps in zip(found, traces(list(found.values())), strict=True):
        most = MOST["serve"] if task == "serve" else COSTLY.get(name, MOST["train"])
        for step, s in steps.items():
            assert not s.wrong, (name, task, step, s.wrong)
            assert s.launches <= most, (name, task, step, s.launches)
            assert s.waited <= WAITS.get(name, 1), (name, task, step, s.waits)


def test_compiled_blocks_are_not_traced():
    e = make(shallow("llama-mini"), "h100-sxm", {"kind": "pretrain", "data": "x", "seq_len": 64}, ["torch_compile"])
    with pytest.raises(UserError, match="compiler makes of a step cannot be traced"):
        trace([e])


def test_what_cannot_be_traced_is_said():
    with pytest.raises(UserError, match="cannot be traced without them"):
        trace([make("llama-mini", "4xh100-sxm", {"kind": "pretrain", "data": "x", "seq_len": 64}, ["data_parallel"])])
    with pytest.raises(UserError, match="cannot be traced without them"):
        trace([serving("llama-mini", "pipeline:degree=2", on="2xh100-sxm")])
