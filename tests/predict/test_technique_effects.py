"""Effects that techniques are predicted to have, each against what its paper or its bytes say."""

import json

import pytest

from ridgeline import catalog, experiments
from ridgeline.graph import Op, tokens_graph
from ridgeline.graph.graph import changed
from ridgeline.predict import predict, without_effect
from ridgeline.predict.common import rewritten
from ridgeline.predict.operators.kernel import op_time
from ridgeline.predict.serving.arrivals import requests
from ridgeline.predict.serving.engine_costs import ENGINES, PLANNED, find_engine
from ridgeline.predict.serving.engine_fusions import fuse
from ridgeline.predict.serving.simulate import surface_of
from ridgeline.spec.draft_head import CONFIG, FORMAT, head_spec
from ridgeline.spec.huggingface import to_hf_config
from ridgeline.spec.scheduling import Speculation
from ridgeline.techniques.registry import default_plan, resolve

STEADY = {"kind": "serve", "engine": "vllm", "concurrency": 1, "requests": 4, "prompt_len": 512, "output_len": 129}


def metrics(plan, on="a100-80g-sxm", **workload):
    r = predict(experiments.make("llama2-7b", on, {**STEADY, **workload}, plan))
    assert r.status == "ok", r.reason
    return {name: m.value for name, m in r.metrics.items()}, r


def test_expected_tokens_of_a_draft_are_those_of_the_paper():
    """arXiv:2211.17192, equation 1 and figure 2."""
    for k, a in ((1, 0.5), (4, 0.7), (7, 0.9)):
        assert Speculation(k, a).expected_tokens == pytest.approx((1 - a ** (k + 1)) / (1 - a))
    assert Speculation(4, 0.0).expected_tokens == 1


def test_accepted_drafts_divide_the_time_of_a_token():
    plain, drafted = (metrics(p)[0]["tpot_s"] for p in ([], ["speculative:tokens=4,acceptance=0.7"]))
    tokens = Speculation(4, 0.7).expected_tokens
    # Five rows wait for the same weights as one: at least the plain pass, and at most that and half of it again.
    assert plain < drafted * tokens < 1.5 * plain
    crowd = [metrics(p, concurrency=256, requests=512, engine="vllm")[0]["tokens_per_s"]
             for p in ([], ["speculative:tokens=16,acceptance=0.1"])]  # fmt: skip
    assert crowd[1] == pytest.approx(crowd[0]), "drafts that do not pay are left out"


@pytest.mark.parametrize(
    ("on", "engine", "plan"), [("a100-80g-sxm", {}, []), ("h100-sxm", {"engine": "ridgeline"}, default_plan("serve"))]
)
def test_a_drafting_model_takes_time_of_its_own(on, engine, plan, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(catalog.model("llama3.2-1b"))))
    free, paid = (metrics([*plan, f"speculative:acceptance=0.8{draft}"], on, **engine)[0]["tpot_s"]
                  for draft in ("", f",draft={tmp_path}"))  # fmt: skip
    small = predict(experiments.make("llama3.2-1b", on, {**STEADY, **engine}, plan)).metrics["tpot_s"].value
    passes = (paid - free) * Speculation(4, 0.8).expected_tokens
    assert 0.5 * small < passes / 4 < small, "four passes of it, without the engine's own time between two iterations"


def head_of(model, folder):
    """The configuration of a head of a catalog's model, which is all that a prediction reads."""
    folder.mkdir()
    about = {"format": FORMAT, "base": "", "layer": head_spec(catalog.model(model)).model_dump(mode="json")}
    (folder / CONFIG).write_text(json.dumps(about))
    return folder


def test_a_head_costs_a_layer_and_logits_for_each_level(tmp_path):
    """arXiv:2401.15077: against free drafts of the same acceptance, in multiples of what is read of memory."""
    head = head_of("llama2-7b", tmp_path / "head")
    free, paid = (metrics([f"speculative:acceptance=0.8,tokens=4{d}"])[0]["tpot_s"] for d in ("", f",draft={head}"))
    plain, m = metrics([])[0]["tpot_s"], catalog.model("llama2-7b")
    layer = sum(p.numel for p in m.block_parameters(0)) + 2 * m.hidden_size**2
    share = (layer + m.hidden_size * m.vocab_size) / m.num_parameters  # of the weights that a pass of the model reads
    each = (paid - free) * Speculation(4, 0.8).expected_tokens / 4
    assert 0.8 * share < each / plain < 2 * share
    assert paid < 0.6 * plain, "it pays for a single sequence"


def test_a_tree_is_checked_by_as_many_rows_as_it_has_nodes(tmp_path):
    head = head_of("llama2-7b", tmp_path / "head")
    assert Speculation(4, 0.8, nodes=16).rows == 17
    assert Speculation(4, 0.8).rows == 5

    def rate(concurrency, *options):
        plan = [f"speculative:{','.join((f'draft={head}', 'tokens=4', *options))}"]
        load = {"concurrency": concurrency, "requests": 2 * concurrency, "prompt_len": 128}
        return metrics(plan, **load)[0]["tokens_per_s"]

    # One sequence waits for weights: what more nodes keep is gained. Of many, rows of rejected ones cost more.
    few, many = ((rate(n, "acceptance=0.6"), rate(n, "acceptance=0.75", "branches=4", "nodes=48")) for n in (1, 128))
    assert few[1] > few[0]
    assert many[1] < many[0]


def test_the_host_composes_every_level(tmp_path):
    """Our engine's, once more for each of them."""
    head = head_of("llama2-7b", tmp_path / "head")
    load, own = {"engine": "ridgeline"}, find_engine("ridgeline", catalog.device("a100-80g-sxm"))
    short, long = (metrics([f"speculative:draft={head},acceptance=0.9,tokens={k}"], **load)[0]["tpot_s"] * sum(
        0.9**i for i in range(k + 1)) for k in (2, 6))  # fmt: skip
    assert long - short > 4 * (own.iteration_s + own.sequence_s)


def test_a_head_takes_room_of_the_cache(tmp_path):
    head = head_of("llama2-7b", tmp_path / "head")
    load = {"engine": "ridgeline", "kv_cache_bytes": 8 << 30}
    plain, drafted = (metrics(p, **load)[0]["kv_cache_tokens"] for p in (["paged_kv"], [
        "paged_kv", f"speculative:draft={head}"]))  # fmt: skip
    assert drafted / plain == pytest.approx(64 * 4096 / (66 * 4096 + 4096 + 1), rel=2e-3)


def test_an_unknown_acceptance_is_said():
    plain, (silent, result) = metrics([])[0], metrics(["speculative"])
    assert silent == plain
    assert any("acceptance" in note for note in result.notes)


def test_sparse_cores_double_products_and_almost_halve_weights():
    """arXiv:2104.08378: twice the dense rate; two bits for the place of every kept weight of sixteen."""
    device = catalog.device("a100-80g-sxm")
    op = Op("x", "mlp", "gemm", flops=2.0 * 8192**3, bytes=6.0 * 8192**2, dtype="bf16", shape=(8192, 8192, 8192))
    assert op_time(op, device).seconds / op_time(changed(op, sparse=True), device).seconds == pytest.approx(2, rel=0.1)

    def memory(plan, on="a100-80g-sxm"):
        w = {"kind": "generate", "batch_size": 1, "prompt_len": 128, "output_len": 8, "engine": "vllm"}
        r = predict(experiments.make("llama2-7b", on, w, plan))
        return next(m.bytes for m in r.memory if m.category == "parameters"), r.metrics["tpot_s"].value

    (dense, slow), (sparse, fast) = memory([]), memory(["wanda:pattern=2:4"])
    layers = 32 * (4 * 4096**2 + 3 * 4096 * 11008) * 2
    assert dense - sparse == pytest.approx((1 - 9 / 16) * layers)
    assert 1 < slow / fast < 16 / 9
    assert memory(["wanda"]) == memory([]), "scattered zeros are stored and multiplied"
    assert memory(["wanda:pattern=2:4"], "v100-32g-sxm") == memory([], "v100-32g-sxm")
    assert memory(["wanda:pattern=2:4", "gptq"]) == memory(["gptq"]), "codes have kernels of their own"


def test_adapters_take_memory_of_the_cache_and_time():
    plain, loaded = (metrics(p)[0] for p in ([], ["multi_adapter:adapters=16,rank=32"]))
    held = 16 * 32 * 32 * (4 * (4096 + 4096) + 3 * (4096 + 11008)) * 2
    per_token = 2 * 32 * 32 * 128 * 2
    assert plain["kv_cache_tokens"] - loaded["kv_cache_tokens"] == pytest.approx(held / per_token, abs=1)
    assert loaded["tpot_s"] > plain["tpot_s"]


def test_adapters_on_our_engine_are_two_products_for_each_input():
    """In captured steps, so that the host's launches do not decide: over all rows of a step and merged layers. Engines
    that launch two products for each layer take longer for them."""
    plan = ["continuous_batching", "paged_kv", "flash_attention", "padding_free"]
    more = {}
    for engine in ("ridgeline", "vllm"):
        w = {"kind": "serve", "prompt_len": 512, "output_len": 32, "concurrency": 16, "requests": 16, "dtype": "bf16",
             "engine": engine}  # fmt: skip
        both = [predict(experiments.make("llama3.1-8b", "h100-sxm", w, [*plan, *p])).metrics["itl_p50_s"].value
                for p in ([], ["multi_adapter:adapters=16,rank=16"])]  # fmt: skip
        more[engine] = both[1] - both[0]
    assert 0 < more["ridgeline"] < more["vllm"] < 3e-3
    e = experiments.make("llama3.1-8b", "h100-sxm", {**w, "engine": "ridgeline"}, [*plan, "multi_adapter:adapters=4"])
    e, techniques = resolve(e)
    g = rewritten(tokens_graph(e.model, 8, 1, 1, e.dtype), e, techniques)
    plain = {o.name: o for b in g.blocks for o in b.forward if ".lora_" in o.name}
    g = fuse(g, find_engine("ridgeline", e.cluster.device), e.model)
    ops = {o.name: o for b in g.blocks for o in b.forward if ".lora_" in o.name}
    names = ("attention.q_proj", "attention.o_proj", "mlp.gate_proj", "mlp.down_proj")
    assert sorted(ops) == sorted(f"{n}.lora_{what}" for n in names for what in ("shrink", "expand"))
    assert ops["attention.q_proj.lora_shrink"].shape == (8, 24, 4096)
    assert ops["mlp.gate_proj.lora_expand"].shape == (8, 28672, 8)
    assert sum(o.flops for o in ops.values()) == pytest.approx(sum(o.flops for o in plain.values()))
    moved = {leaf: sum(o.bytes for o in plain.values() if o.name.endswith(leaf)) for leaf in ("_a", "_b", "_add")}
    shrunk, expanded = (sum(o.bytes for n, o in ops.items() if n.endswith(w)) for w in ("shrink", "expand"))
    assert moved["_a"] - shrunk == pytest.approx(3 * 8 * 4096 * 2)  # inputs that are read once for several layers
    assert expanded == pytest.approx(moved["_b"] + moved["_add"] / 3)


def test_pads_cost_what_lengths_differ():
    def rate(plan, cv):
        fields = {"engine": "ridgeline", "concurrency": 16, "requests": 64, "length_cv": cv}
        return metrics(["flash_attention", "continuous_batching", *plan], **fields)[0]["tokens_per_s"]

    # Without it, too, a prompt that does not fit beside others with its padding goes in a step of its own.
    gains = [rate(["padding_free"], cv) / rate([], cv) for cv in (0.0, 0.4, 0.8)]
    assert gains == sorted(gains)
    assert gains[2] > 1.05 > gains[0]


# ---- what a schedule's techniques do where no engine is named: the plan's is the schedule ----

SCHEDULE = ["paged_kv", "continuous_batching", "chunked_prefill", "padding_free", "hierarchical_search",
            "flash_attention"]  # fmt: skip
CROWD = {"engine": "", "concurrency": 64, "requests": 192, "output_len": 256, "length_cv": 0.7, "max_num_seqs": 32,
         "max_num_batched_tokens": 1024}  # fmt: skip


def without(*names):
    return [t for t in SCHEDULE if t not in names]


@pytest.mark.parametrize("name", ["continuous_batching", "padding_free", "hierarchical_search", "flash_attention"])
def test_each_raises_throughput_beside_the_others(name):
    full, less = (metrics(plan, "a800-80g", **CROWD)[0] for plan in (SCHEDULE, without(name)))
    assert full["tokens_per_s"] > less["tokens_per_s"]


def test_prompts_in_pieces_do_not_hold_up_sequences_that_decode():
    """arXiv:2308.16369: chunks fill what decoding leaves of the token budget; a whole prompt takes a step of its own,
    which comes at once, so that the first token is not late, but the next tokens of running sequences are."""
    full, less = (metrics(plan, "a800-80g", **{**CROWD, "prompt_len": 2000})[0]
                  for plan in (SCHEDULE, without("chunked_prefill")))  # fmt: skip
    assert full["itl_p99_s"] < 0.5 * less["itl_p99_s"]
    assert full["tpot_s"] < less["tpot_s"]
    assert full["tokens_per_s"] > less["tokens_per_s"]


def test_blocks_hold_more_sequences_in_a_small_cache():
    """arXiv:2309.06180: of reserved outputs most stand empty."""
    small = {**CROWD, "output_len": 1500, "max_num_seqs": 256, "requests": 128}
    full, less = (metrics(plan, "rtx4090", **small)[0] for plan in (SCHEDULE, without("paged_kv")))
    assert full["batch_mean"] > 1.1 * less["batch_mean"]


def test_equal_requests_leave_continuous_batching_and_packing_nothing_to_save():
    """All of one length, as many as there are places, again and again."""
    even = {**CROWD, "length_cv": 0.0, "concurrency": 32, "requests": 32, "max_num_batched_tokens": 32768}
    full, less = (metrics(plan, "a800-80g", **even)[0]
                  for plan in (SCHEDULE, without("continuous_batching", "padding_free")))  # fmt: skip
    assert full == pytest.approx(less)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_an_engine_always_does_changes_nothing_and_is_said(engine):
    for name in SCHEDULE if engine == "vllm" else without("paged_kv"):  # whose blocks are others than SGLang's
        bare, (named, result) = metrics([], **{**CROWD, "engine": engine})[0], metrics(
            [name], **{**CROWD, "engine": engine})  # fmt: skip
        assert named == bare
        assert any(name in note and "whatever the plan says" in note for note in result.notes)


def test_a_plan_without_an_engine_says_what_it_lacks():
    _, result = metrics(without("paged_kv"), **CROWD)
    assert [n for n in result.notes if "no engine is named" in n and "without paged_kv:" in n]


def test_a_prediction_says_what_a_server_would_add_and_which_load_was_assumed():
    def notes(plan, **fields):
        e = experiments.make("llama3.1-8b", "h100-sxm", {"kind": "serve", "requests": 4, **fields}, plan)
        return predict(e).notes

    own = notes([], engine="ridgeline", rate=2.0)
    assert any("`ridgeline serve` has by default" in n and "continuous_batching" in n for n in own)
    assert not any("by default" in n for n in notes(["continuous_batching"], engine="ridgeline", rate=2.0))
    assert not any("no load is given" in n for n in own)
    assert any("no load is given: one request per second" in n for n in notes([], engine="vllm"))


def test_engines_take_what_they_do_not_have():
    """TensorRT-LLM as it is measured reads whole prompts and reserves whole outputs; both are options of it."""
    load = {**CROWD, "engine": "trtllm", "prompt_len": 900, "max_num_seqs": 64}
    bare, chunks = (metrics(p, **load)[0] for p in ([], ["chunked_prefill"]))
    assert chunks["itl_p99_s"] != bare["itl_p99_s"]
    small = {**load, "output_len": 1500, "max_num_seqs": 256, "requests": 128}
    bare, blocks = (metrics(p, "rtx4090", **small)[0] for p in ([], ["paged_kv"]))
    assert blocks["batch_mean"] > bare["batch_mean"]


@pytest.mark.parametrize(("engine", "added"), [("hf", True), ("trtllm", True), ("vllm", False), ("ridgeline", False)])
def test_what_an_engine_does_not_do_by_itself_is_said(engine, added):
    """Hugging Face's generate has no queue to take requests from: a gain by one is not to be had there."""
    notes = metrics(["continuous_batching", "chunked_prefill"], engine=engine)[1].notes
    found = [n for n in notes if "in another way by default" in n and "chunked_prefill" in n]
    assert bool(found) == added
    assert any("continuous_batching" in n for n in found) == (engine == "hf")


@pytest.mark.parametrize("engine", ["vllm-2023", "tgi", "sglang"])
def test_a_paged_engine_is_not_said_to_have_no_pages(engine):
    """It pages; what differs with ``paged_kv`` are shared prefixes or the size of a block."""
    notes = metrics(["paged_kv"], engine=engine)[1].notes
    assert [n for n in notes if "in another way by default" in n and "paged_kv" in n]
    assert not [n for n in notes if "does not" in n and "paged_kv" in n]


@pytest.mark.parametrize(
    ("plan", "engine", "same"),
    [
        (["paged_kv", "chunked_prefill", "continuous_batching"], "trtllm", ["chunked_prefill", "paged_kv"]),
        (["speculative:acceptance=0.01,tokens=16"], "vllm", ["speculative"]),
        (["speculative:acceptance=0.7"], "vllm", []),
        (["flash_attention"], "vllm", []),  # said in a note of the prediction
    ],
)
def test_what_changes_no_metric_is_named(plan, engine, same):
    load = {**STEADY, "engine": engine, "concurrency": 8, "requests": 16}
    assert without_effect(experiments.make("llama2-7b", "a100-80g-sxm", load, plan)) == same


def test_an_engine_without_one_kernel_for_attention_gains_by_it():
    """llama.cpp of 2024 had it as an option: what is predicted with it must not be said to be predicted without."""
    bare, (fast, result) = metrics([], engine="llama.cpp")[0], metrics(["flash_attention"], engine="llama.cpp")
    assert fast["tpot_s"] < bare["tpot_s"]
    assert not [n for n in result.notes if "predicted as without" in n]
    assert not [n for n in result.notes if "whatever the plan says" in n]


@pytest.mark.parametrize("engine", ["", "ridgeline", "hf"])
@pytest.mark.parametrize("on", ["a800-80g", "rtx4090", "l40s", "b200"])
def test_attention_in_one_kernel_shortens_long_prompts(engine, on):
    """arXiv:2205.14135: without it a matrix of all pairs of tokens goes to memory and back, of each head."""
    gains = []
    for length in (128, 512, 2000):
        plain, fused = (metrics(plan, on, engine=engine, prompt_len=length, output_len=9, concurrency=1)[0]["ttft_s"]
                        for plan in ([], ["flash_attention"]))  # fmt: skip
        gains.append(plain / fused)
    assert gains[0] > 0.98, "the weights take most of the time of a short one"
    assert gains[2] > 1.1
    assert engine == "ridgeline" or gains[2] > gains[1]  # ours gains captured steps, too, which matter to short ones
    plain, fused = (metrics(plan, on, engine=engine)[1] for plan in ([], ["flash_attention"]))
    assert {r.kind for r in plain.breakdown} - {r.kind for r in fused.breakdown} >= {"softmax", "bmm"}


@pytest.mark.parametrize("engine", ["", "hf"])
@pytest.mark.parametrize(("model", "on"), [("llama2-7b", "a100-80g-sxm"), ("llama3.1-8b", "h100-sxm"),
                                           ("deepseek-v2-lite", "h100-sxm"), ("mixtral-8x7b", "b200")])  # fmt: skip
def test_attention_in_one_kernel_is_slower_in_no_step(engine, model, on):
    """Of few queries, too: the products, the mask and the softmax are several small kernels."""

    def surface(plan):
        e, techniques = resolve(experiments.make(model, on, {**STEADY, "engine": engine}, plan))
        return surface_of(e, techniques, requests(e.workload))

    plain, fused = surface([]), surface(["flash_attention"])
    for n in (1, 4, 16, 64):
        assert fused.parts.attention(n, 1, 1024) <= plain.parts.attention(n, 1, 1024)
        assert fused.parts.attention(1, 16 * n, 16 * n) <= plain.parts.attention(1, 16 * n, 16 * n)


def test_score_matrices_take_room_of_the_cache():
    """Of the longest prompt: two matrices of 32 heads in 16 bits."""
    long = {"prompt_len": 3900, "max_num_batched_tokens": 4096, "output_len": 65, "engine": ""}
    plain, fused = (metrics(["continuous_batching", "padding_free", *plan], **long)[0]["kv_cache_tokens"]
                    for plan in ([], ["flash_attention"]))  # fmt: skip
    matrices = 2 * 32 * 3965**2 * 2
    assert fused - plain == pytest.approx(matrices / (2 * 32 * 32 * 128 * 2), abs=1)


def test_our_engine_captures_only_steps_of_one_kernel_for_attention():
    def surfaces(plan):
        e, techniques = resolve(experiments.make("llama2-7b", "h100-sxm", {**STEADY, "engine": "ridgeline"}, plan))
        return surface_of(e, techniques, requests(e.workload))

    plain, fused = surfaces(["padding_free"]), surfaces(["padding_free", "flash_attention"])
    assert (plain.engine.graphs, plain.captured) == (False, [])
    assert fused.engine.graphs
    assert fused.captured


def test_our_engine_computes_score_matrices_sequence_by_sequence():
    """Which takes its host time, too; one kernel computes those of all."""

    def surface(plan):
        e, techniques = resolve(experiments.make("llama2-7b", "h100-sxm", {**STEADY, "engine": "ridgeline"}, plan))
        return surface_of(e, techniques, requests(e.workload))

    plain, fused = surface(["padding_free"]), surface(["padding_free", "flash_attention"])
    assert plain.parts.attention(8, 1, 1024) == pytest.approx(8 * plain.parts.attention(1, 1, 1024))
    assert fused.parts.attention(8, 1, 1024) < 6 * fused.parts.attention(1, 1, 1024)
    assert plain.parts.sequence_s > 0 == fused.parts.sequence_s
    load = {"engine": "ridgeline", "requests": 32}
    one, crowd = (metrics(["continuous_batching"], "h100-sxm", **load, concurrency=n)[0]["tpot_s"] for n in (1, 32))
    assert crowd - one > 16 * plain.parts.sequence_s


def test_score_matrices_of_padded_prompts_are_there_together():
    def lost(tokens):
        fields = {"engine": "hf", "concurrency": 8, "requests": 8, "prompt_len": 1000, "output_len": 25,
                  "max_num_seqs": tokens // 1025, "max_num_batched_tokens": tokens}  # fmt: skip
        plain, fused = (metrics(plan, **fields)[0]["kv_cache_tokens"] for plan in ([], ["flash_attention"]))
        return fused - plain

    assert 6 * lost(1025) < lost(8 * 1025) < 9 * lost(1025)


def test_score_matrices_take_room_of_our_own_cache_unless_its_size_is_given():
    fields = {"engine": "ridgeline", "prompt_len": 3900, "output_len": 65, "max_num_batched_tokens": 4096}
    for share, less in (({}, True), ({"kv_cache_share": 0.5}, True), ({"kv_cache_bytes": 8_000_000_000}, False)):
        plain, fused = (metrics(["padding_free", *plan], **fields, **share)[0]["kv_cache_tokens"]
                        for plan in ([], ["flash_attention"]))  # fmt: skip
        assert (plain < fused) == less


@pytest.mark.parametrize("engine", sorted(ENGINES.keys() - {"", PLANNED, "ridgeline", "hf", "llama.cpp"}))
def test_engines_that_always_attend_in_one_kernel_say_so(engine):
    fields = {**STEADY, "engine": engine}
    if engine in ("mlc", "gpt-fast"):
        fields["max_num_seqs"] = 1
    bare, (named, result) = metrics([], **fields)[0], metrics(["flash_attention"], **fields)
    assert named == bare
    assert any("flash_attention" in note and "whatever the plan says" in note for note in result.notes)


@pytest.mark.parametrize(("engine", "says"), [("ridgeline", True), ("hf", True), ("llama.cpp", True), ("vllm", False)])
def test_an_engine_that_could_do_without_score_matrices_says_that_it_has_them(engine, says):
    fields = {"engine": engine, "max_num_seqs": 1}
    for plan, said in ((["continuous_batching"], says), (["continuous_batching", "flash_attention"], False)):
        notes = metrics(plan, **fields)[1].notes
        assert any("matrix of scores" in n for n in notes) == said
