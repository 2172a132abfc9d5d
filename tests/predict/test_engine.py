"""Engines and their cost surface: fusion, host time, tables, all-reduce."""

import math

import numpy as np
import pytest

from ridgeline import catalog, experiments
from ridgeline.graph import tokens_graph
from ridgeline.graph.layers import distinct_experts
from ridgeline.predict import predict
from ridgeline.predict.common import rank_cluster
from ridgeline.predict.serving.arrivals import requests
from ridgeline.predict.serving.engine_costs import ENGINES, find_engine
from ridgeline.predict.serving.iteration_time import GRID, Iterations, one_shot
from ridgeline.predict.serving.simulate import surface_of
from ridgeline.spec.errors import UserError
from ridgeline.techniques.registry import check, resolve


def surface(model="llama3.1-8b", on="h100", plan=(), engine="vllm", contexts=(512, 4096)):
    e = experiments.make(model, on, {"kind": "serve", "engine": engine}, list(plan))
    return Iterations(e, check(e), rank_cluster(e), find_engine(engine, e.cluster.device), contexts)


def names(g):
    return [o.name for b in g.blocks if b.name == "layers" for o in b.forward]


def test_fusion_keeps_the_work():
    s = surface()
    plain = tokens_graph(s.e.model, 4, 1, 512, "bf16")
    fused = s.graph(4, 1, 512)
    assert fused.flops == pytest.approx(plain.flops)
    assert len(names(fused)) <= 9 < len(names(plain))
    weights = 2 * (s.e.model.num_parameters - s.e.model.vocab_size * s.e.model.hidden_size)
    gemms = sum(b.repeat * o.bytes for b in fused.blocks for o in b.forward if o.kind == "gemm")
    assert gemms == pytest.approx(weights, rel=0.02)


def test_8_bit_inputs_are_written_by_the_norm():
    quantized = names(surface(plan=["fp8"]).graph(4, 1, 512))
    assert [n for n in quantized if n.endswith(".quantize")] == ["attention.o_proj.quantize", "mlp.down_proj.quantize"]


def test_our_own_8_bit_inputs_are_a_cast_for_each_product_of_several_rows():
    """As steps of a served model launch them (``tests/gpu/test_traced.py``)."""
    own = surface(plan=["fp8"], engine="ridgeline")

    def casts(batch):
        return [o for b in own.graph(batch, 1, 512).blocks for o in b.forward if o.name.endswith(".quantize")]

    assert [(o.name, o.kind) for o in casts(9)] == [
        (f"{name}_proj.quantize", "cast") for name in ("attention.q", "attention.o", "mlp.gate", "mlp.down")
    ]  # fmt: skip
    assert casts(9)[0].bytes == 9 * own.e.model.hidden_size * (2 + 2 + 1)
    assert casts(8) == casts(1) == []


@pytest.mark.parametrize(("on", "units"), [("h100", True), ("a100", False)])
def test_our_own_products_with_8_bit_weights(on, units):
    """Of few rows in 16 bits by codes, of more as the device can: by codes as long as a weight is not better expanded
    first. As ``tests/nn/test_gemv.py`` and ``test_lowbit_triton.py`` have the engine's choice."""
    own = surface(on=on, plan=["fp8"], engine="ridgeline")
    h, width = own.e.model.hidden_size, own.e.model.intermediate_size

    def product(rows):
        ops = {o.name: o for b in own.graph(rows, 1, 512).blocks for o in b.forward}
        return ops["mlp.down_proj"], ops.get("mlp.down_proj.expand")

    for rows in (1, 8, 9, 128, 129):
        op, expand = product(rows)
        low = units and rows > 8
        assert op.dtype == ("fp8" if low else "bf16")
        weight = 1 if units or rows <= 128 else 2
        assert op.bytes == rows * (h * 2 + width * (1 if low else 2)) + h * width * weight
        assert (op.weight_dtype, op.weight_bytes) == ("fp8" if weight == 1 else "", h * width * weight)
        assert (None if expand is None else expand.bytes) == (3 * h * width if weight == 2 else None)
    dense = surface(on=on, engine="ridgeline")
    steps = [(own.body(n), dense.body(n)) for n in (1, 8, 64, 2048)]
    assert all(codes < plain for codes, plain in steps[: 3 if units else 2])  # half of the bytes; 64 rows by codes
    # take as long to widen them as bytes of 16 bits to come
    assert (steps[3][0] < steps[3][1]) == units  # many rows gain by the products, or lose by the expansion


@pytest.mark.parametrize(("plan", "bits", "on"), [
    ("rtn:bits=4,group_size=128", 4 + 16 / 128, "h100"), ("rtn:bits=8,group_size=0", 8, "h100"),
    ("mxfp4:layers=all", 4.25, "h100"), ("mxfp4:layers=all", 4.25, "b200"), ("fp8", 8, "a100"),
])  # fmt: skip
def test_our_own_products_with_codes_of_many_rows_expand_the_weight(plan, bits, on):
    """One kernel reads the codes and writes 16 bits, which the product reads; up to 128 rows it reads the codes. Other
    engines' kernels expand in registers. ``tests/nn/test_lowbit_triton.py`` has the engine's choice."""

    def product(engine, rows):
        s = surface(on=on, plan=[plan], engine=engine)
        ops = {o.name: o for b in s.graph(rows, 1, 512).blocks for o in b.forward}
        return s, ops["mlp.down_proj"], ops.get("mlp.down_proj.expand")

    s, op, expand = product("ridgeline", 128)
    h, width = s.e.model.hidden_size, s.e.model.intermediate_size
    codes, whole = h * width * bits / 8, 2 * h * width
    assert (expand, op.dtype, op.weight_bytes) == (None, "bf16", pytest.approx(codes, rel=2e-3))  # scales of rows
    _, op, expand = product("ridgeline", 129)
    assert (expand.kind, expand.bytes) == ("cast", pytest.approx(codes + whole, rel=2e-3))
    assert (op.dtype, op.weight_dtype, op.weight_bytes) == ("bf16", "", whole)
    assert op.bytes == 129 * 2 * (h + width) + whole
    assert product("vllm", 129)[2] is None


@pytest.mark.parametrize(("plan", "most"), [
    ([], math.inf), (["mxfp4"], 128), (["fp8"], 8), (["rtn"], 128), (["rtn:group_size=8"], 0), (["qmoe"], 0),
    (["qmoe:grid=2bit"], 128), (["finequant"], 0), (["fptq"], 0), (["quantease"], 128),
    (["quantease:outliers=0.01"], 0),
])  # fmt: skip
def test_steps_with_experts_in_codes_are_captured_where_they_are_one_product(plan, most):
    """Of up to ``most`` rows for each expert (``tests/gpu/test_traced.py``); of more, the host waits for their numbers,
    and launches operators."""
    usual = ["padding_free", "flash_attention"]
    own, plain = (surface(model="mixtral-8x7b", on="h200", plan=[*usual, *p], engine="ridgeline") for p in (plan, []))
    assert own.engine.graphs == (most > 0)
    assert own.captured == [t for t in plain.captured if t <= 4 * most]
    assert plain.captured[-1] > 512


@pytest.mark.parametrize(("dtype", "on", "captures"), [
    ("bf16", "h200", True), ("fp16", "v100-32g", False), ("fp32", "h200", False), ("fp32", "v100-32g", False),
])  # fmt: skip
@pytest.mark.parametrize("plan", [[], ["mxfp4"]])
def test_experts_in_32_bits_are_computed_one_after_the_other(dtype, on, captures, plan):
    """As ``tests/nn/test_grouped_codes.py`` has it of the engine; and PyTorch's grouped product needs Ampere, codes do
    not."""
    work = {"kind": "serve", "engine": "ridgeline", "dtype": dtype}
    e = experiments.make("mixtral-8x7b", on, work, ["padding_free", "flash_attention", *plan])
    s = Iterations(e, check(e), rank_cluster(e), find_engine("ridgeline", e.cluster.device), (512, 4096))
    assert bool(s.captured) == s.engine.graphs == (captures or (dtype == "fp16" and bool(plan)))
    assert surface(model="mixtral-8x7b", on="h200", plan=plan).engine.graphs
    dense = surface(plan=["mxfp4:layers=all", "flash_attention"], engine="ridgeline")
    assert dense.engine.graphs


@pytest.mark.parametrize("model", ["gpt2", "llama3.1-8b"])
@pytest.mark.parametrize("engine", ["vllm", "ridgeline"])
def test_each_input_of_8_bit_products_is_cast_once(model, engine):
    """By a kernel of its own, or where another engine's norm writes it; layers without gates have inputs, too."""
    s = surface(model=model, plan=["fp8"], engine=engine)
    casts = [n for n in names(s.graph(64, 1, 512)) if n.endswith(".quantize")]
    inputs = ["attention.q_proj", "attention.o_proj", "mlp.gate_proj" if s.e.model.gated else "mlp.up_proj",
              "mlp.down_proj"]  # fmt: skip
    assert casts == [f"{n}.quantize" for n in (inputs if engine == "ridgeline" else inputs[1::2])]


@pytest.mark.parametrize("plan", [[], ["fp8"], ["mxfp4:layers=all"]])
def test_weights_take_their_bytes(plan):
    s = surface(plan=plan)
    stored = sum(p.stored_bytes * n for p, n in s.graph(1, 1, 1).params)
    linear = sum(p.numel for p in s.e.model.parameters() if "_proj" in p.name)
    width = {"": 2.0, "fp8": 1.0, "mxfp4:layers=all": 4.25 / 8}[plan[0] if plan else ""]
    assert stored == pytest.approx(linear * width + (s.e.model.num_parameters - linear) * 2, rel=0.001)


def test_tables_are_exact_on_the_grid_and_between():
    s = surface()
    for n in (1, 64, 2048):
        assert s.body(n) == pytest.approx(s.parts.total(s.graph(n, 1, 1), attention=False, head=False))
    low, high = s.body(64), s.body(96)
    assert s.body(80) == pytest.approx((low + high) / 2)
    assert all(s.body(n) > 0 for n in GRID[:10])


def test_decode_is_linear_in_the_cache():
    s = surface()
    a, b = s.decode(16)
    for context in (512, 2048, 4096):
        exact = s.body(16) + s.head(16) + s.parts.attention(16, 1, context)
        assert a + b * 16 * context == pytest.approx(exact, rel=0.03)
    assert s.mixed([], 16, 16 * 1024) == pytest.approx(a + b * 16 * 1024 + s.between(16))


def test_a_window_caps_what_decode_reads():
    s = surface("gpt-oss-20b")
    kinds = {b.forward[-1].name: b.repeat for b in s.graph(1, 1, 4096).blocks if b.name == "layers"}
    assert sum(b.repeat for b in s.graph(1, 1, 4096).blocks if b.name == "layers") == 24, kinds
    windowed = [b for b in s.graph(1, 1, 4096).blocks if b.name == "layers"][1]
    flash = next(o for o in windowed.forward if o.kind == "attention")
    assert flash.shape[-2] == 128


def test_chunks_of_a_prompt_cost_at_least_the_whole():
    s = surface(engine="vllm")
    whole = s.mixed([(4096, 0)], 0, 0)
    parts = s.mixed([(2048, 0)], 0, 0) + s.mixed([(2048, 2048)], 0, 0)
    assert whole < parts < 1.5 * whole


def test_host_time_counts_where_it_is_longer():
    plan = ["tensor_parallel:degree=8"]
    eager = surface("llama2-70b", "8xa100", plan, "vllm-2023")
    gpu = eager.decode(1)[0]
    assert eager.floor(1) > gpu
    assert eager.mixed([], 1, 512) == pytest.approx(eager.floor(1) + eager.between(1))
    hidden = surface("llama2-70b", "8xa100", plan, "trtllm")
    assert hidden.floor(256) > hidden.floor(1) > 0
    assert hidden.between(256) == hidden.between(1)


def test_engines_by_name():
    a100, h100 = catalog.device("a100"), catalog.device("h100")
    assert find_engine("TensorRT", a100) == ENGINES["trtllm"]
    assert find_engine("SGLang", a100) == ENGINES["sglang"]
    assert find_engine("vllm-2023", h100).dispatch_s == pytest.approx(0.7 * ENGINES["vllm-2023"].dispatch_s)
    with pytest.raises(UserError, match="unknown engine 'vvlm'"):
        find_engine("vvlm", a100)


@pytest.mark.parametrize("engine", ["vllm-2023", "lightllm"])
def test_servers_of_2023_take_the_longest_request_in_an_iteration(engine):
    """vLLM 0.2: max_num_batched_tokens is by default that of one request, 2048 at least. 7B fits 24 GB with it."""

    def served(**fields):
        load = {"kind": "serve", "engine": engine, "rate": 1.0, "requests": 20, **fields}
        return predict(experiments.make("llama2-7b", "rtx3090", load, []))

    default = served()
    assert default.status == "ok"
    assert default.metrics == served(max_num_batched_tokens=4096).metrics
    assert served(max_model_len=1024).metrics == served(max_model_len=1024, max_num_batched_tokens=2048).metrics
    assert served(max_num_batched_tokens=65536).status == "infeasible"


def test_the_last_token_of_a_prompt_is_a_decode_steps_where_the_engine_leaves_it_to_one():
    """InternLM/lmdeploy v0.1, LlamaBatch.cc: contextDecode takes input_length - 1 tokens."""
    s = surface("llama2-7b", "a100", (), "lmdeploy-0.1")
    step = s.mixed([], 1, 128)
    assert s.mixed([(128, 0)], 0, 0) == pytest.approx(step + s._mixed([(127, 0)], 0, 0))
    assert s.mixed([(1, 0)], 0, 0) == s.mixed([], 1, 1)
    assert s.mixed([(64, 0), (64, 64)], 2, 100) > s.mixed([], 4, 100 + 64 + 128)
    other = surface("llama2-7b", "a100", (), "vllm-2023")
    assert other.mixed([(128, 0)], 0, 0) < other._mixed([(127, 0)], 0, 0) + other.mixed([], 1, 128)


def test_prompts_of_quantized_layers_are_as_fast_as_their_kernels():
    """vLLM's kernels for int4 layers multiply many rows as fast as 16-bit products; those of 2023 and of experts do
    not, which wait for weights to be expanded."""

    def slower(model, technique, engine):
        def prompt(plan):
            return surface(model, "h100", plan, engine).mixed([(2048, 0)], 0, 0)

        return prompt([technique]) / prompt([])

    assert slower("llama3.1-8b", "gptq:group_size=128", "vllm") == pytest.approx(1, abs=0.1)
    assert slower("llama3.1-8b", "gptq:group_size=128", "vllm-2023") > 1.5
    assert slower("gpt-oss-20b", "mxfp4", "vllm") > 1.2


def test_one_shot_all_reduce():
    s = surface("llama2-70b", "8xh100", ["tensor_parallel:degree=8"])
    reduce = next(o for b in s.graph(8, 1, 1).blocks for o in b.forward if o.kind == "all_reduce")
    assert 5e-6 < one_shot(reduce, s.cluster) < 40e-6
    without = s.cluster.model_copy(update={"device": s.cluster.device.model_copy(update={"link": None})})
    assert math.isinf(one_shot(reduce, without))
    small = s.cluster.model_copy(update={"devices_per_node": 4})
    assert math.isinf(one_shot(reduce, small))


def test_uneven_routing_reaches_fewer_experts():
    for experts, chosen in ((8, 2), (128, 8), (16, 1), (4, 4)):
        assert distinct_experts(experts, 1, chosen) == pytest.approx(chosen)  # drawn without replacement
        assert distinct_experts(experts, 10**6, chosen) == pytest.approx(experts, rel=1e-3)
    for tokens in (2, 16, 128):
        even = 128 * (1 - (1 - 8 / 128) ** tokens)
        assert 0.7 * even < distinct_experts(128, tokens, 8) < even


def test_experts_are_drawn_from_uneven_popularities():
    """Tokens whose choice of each expert is independent, with probabilities from the assumed distribution."""
    generator = np.random.default_rng(0)
    for experts, chosen, tokens in ((8, 2, 1), (8, 2, 4), (64, 8, 6), (128, 8, 32)):
        popularity = generator.beta(1, experts / chosen - 1, size=(20000, experts))
        reached = (1 - (1 - popularity) ** tokens).sum(1).mean()
        assert distinct_experts(experts, tokens, chosen) == pytest.approx(reached, rel=0.01)


@pytest.mark.parametrize(("batch", "reached"), [(1, 2.0), (4, 8 * 4 / 7)])
def test_a_decode_step_reads_the_experts_that_its_tokens_choose(batch, reached):
    g = tokens_graph(catalog.model("mixtral-8x7b"), batch, 1, 64, "bf16")
    up = next(o for b in g.blocks for o in b.forward if o.param.endswith("experts.up_proj"))
    assert up.experts == pytest.approx(reached)


def test_surfaces_share_what_does_not_depend_on_the_workload():
    one, other = (
        surface("llama2-7b", "a100-80g-sxm", contexts=(128, 256)),
        surface("llama2-7b", "a100-80g-sxm", contexts=(512, 4096)),
    )
    assert one.body is other.body
    assert one.contexts != other.contexts
    assert one.decode(8) != other.decode(8)
    assert surface("llama2-7b", "h100-sxm", contexts=(128, 256)).body is not one.body


def _in_vllm(model: str, on: str, batch: int):
    workload = {"kind": "generate", "engine": "vllm", "batch_size": batch, "prompt_len": 512, "output_len": 128}
    return predict(experiments.make(model, on, workload, []))


@pytest.mark.parametrize("engine", ["vllm", "ridgeline"])
def test_plans_that_differ_in_scheduling_share_the_times_of_operators(engine):
    """Those of other plans are others."""

    def parts(*plan):
        e = experiments.make("llama3.2-1b", "h100-sxm", {"kind": "serve", "engine": engine, "requests": 2}, plan)
        return surface_of(*resolve(e), requests(e.workload)).parts

    alone = parts()
    assert parts("paged_kv", "continuous_batching") is alone
    assert parts("paged_kv", "continuous_batching", "chunked_prefill", "speculative") is alone
    assert parts("paged_kv", "gptq") is not alone


def test_a_larger_batch_in_an_engine_takes_no_more_seconds_a_token():
    """Logits of all tokens of an iteration (a soft cap's over 256 000 words) would leave no room for the cache: engines
    compute those of the last tokens."""
    found = [_in_vllm("gemma-2-9b", "v100-32g-sxm", batch) for batch in (8, 16, 32, 64)]
    assert all(r.status == "ok" for r in found)
    rates = [r.metrics["tokens_per_s"].value for r in found]
    assert rates == sorted(rates)


@pytest.mark.parametrize("shape", ["heads=16", "layers=16"])
@pytest.mark.parametrize("engine", ["vllm", "ridgeline"])
def test_the_cache_is_that_of_the_pruned_model(engine, shape):
    """Half of the heads or of the layers have half of the keys and values, and their weights leave more room."""
    work = {"kind": "serve", "engine": engine, "requests": 2}
    whole, half = (predict(experiments.make("llama2-7b", "h100-sxm", work, plan)).metrics["kv_cache_tokens"].value
                   for plan in ([], [f"sheared_llama:{shape}"]))  # fmt: skip
    assert half > 2 * whole


def test_ranks_divide_the_heads_that_are_left():
    """Of Gemma 2 2B's eight heads in four groups, LLM-Pruner keeps six in three."""
    work = {"kind": "generate", "engine": "trtllm"}
    with pytest.raises(UserError, match="6 attention heads of gemma-2-2b do not divide over 8 ranks"):
        experiments.make("gemma-2-2b", "8xh100-sxm", work, ["llm_pruner", "tensor_parallel:degree=8"])
    with pytest.raises(UserError, match="3 key/value heads neither divide over 2 ranks"):
        experiments.make("gemma-2-2b", "2xh100-sxm", work, ["llm_pruner", "tensor_parallel:degree=2"])


def test_a_batch_that_does_not_fit_takes_turns():
    """The last ones take as long as a batch of their number, not as long as a whole turn."""

    def seconds(batch):
        return _in_vllm("llama2-13b", "a100-40g-sxm", batch).metrics["e2e_s"].value

    alone = seconds(1)
    turn = next(n for n in range(16, 33) if seconds(n + 1) > seconds(n) + alone / 2)
    assert seconds(2 * turn) == pytest.approx(2 * seconds(turn))
    assert seconds(2 * turn + 1) == pytest.approx(2 * seconds(turn) + alone)


@pytest.mark.parametrize(("engine", "close"), [("tgi", 1e-3), ("lmdeploy-0.1", 1e-3), ("vllm", 0.02)])
def test_a_batch_takes_as_long_as_its_requests_served_at_once(engine, close):
    """Its prompts take four iterations, for which the first ones wait before they decode; vLLM decodes beside them."""
    sizes = {"engine": engine, "prompt_len": 1000, "output_len": 64}
    batch, served = (predict(experiments.make("llama3.1-8b", "h100-sxm", sizes | one, [])).metrics for one in (
        {"kind": "generate", "batch_size": 32}, {"kind": "serve", "concurrency": 32, "requests": 32}))  # fmt: skip
    assert batch["e2e_s"].value == pytest.approx(served["e2e_s"].value, rel=close)
    assert batch["tokens_per_s"].value == pytest.approx(served["tokens_per_s"].value, rel=close)
    assert batch["tpot_s"].value == pytest.approx(served["tpot_s"].value, rel=2 * close)
    assert batch["ttft_s"].value + 63 * batch["tpot_s"].value == pytest.approx(batch["e2e_s"].value)


def test_an_engine_without_room_for_a_cache_cannot_generate():
    """16-bit weights of Mixtral 8x7B fit in 96 GB, but not in the nine tenths of them that vLLM takes."""
    r = _in_vllm("mixtral-8x7b", "h20", 8)
    assert r.status == "infeasible"
    assert "room for 0 cached tokens" in r.reason
    assert "tensor_parallel" in r.reason


@pytest.mark.parametrize("engine", ["vllm", ""])
def test_a_stage_of_a_pipeline_caches_its_own_layers(engine):
    """Two stages have twice the room for caches, and half of the weights each."""
    work = {"kind": "serve", "concurrency": 2, "requests": 2, "engine": engine}
    one = predict(experiments.make("llama3.1-8b", "h100-sxm", work, []))
    two = predict(experiments.make("llama3.1-8b", "2xh100-sxm", work, ["pipeline:degree=2"]))
    assert two.metrics["kv_cache_tokens"].value > 2 * one.metrics["kv_cache_tokens"].value


def test_batches_of_the_user_are_as_large_as_fits():
    """Hugging Face's generate has no limits of its own: the batch is halved until it fits beside 8B on 24 GB. Padded
    batches that run until their longest ends are far behind continuous ones."""
    work = {
        "kind": "serve",
        "concurrency": 200,
        "requests": 200,
        "prompt_len": 161,
        "output_len": 338,
        "length_cv": 1.0,
    }
    for model, on in (("llama-7b", "a10g"), ("llama3.1-8b", "rtx4090")):
        hf, vllm = (predict(experiments.make(model, on, {**work, "engine": name}, [])) for name in ("hf", "vllm"))
        assert hf.status == "ok"
        assert vllm.metrics["tokens_per_s"].value > 3 * hf.metrics["tokens_per_s"].value


def test_an_engine_that_sizes_its_iterations_for_the_context_says_so():
    """Llama 3.1's 131072 positions, all in one iteration, leave no room on 24 GB; 4096 of them do."""
    work = {"kind": "serve", "concurrency": 2, "requests": 2, "engine": "vllm-2023"}
    r = predict(experiments.make("llama3.1-8b", "rtx4090", work, []))
    assert r.status == "infeasible"
    assert "131072 tokens, its longest request (max_model_len)" in r.reason
    assert predict(experiments.make("llama3.1-8b", "rtx4090", {**work, "max_model_len": 4096}, [])).status == "ok"


@pytest.mark.parametrize(("degree", "said"), [(2, False), (8, True)])
def test_links_of_one_server_are_said_to_be(degree, said):
    """Those of eight L40S differ by server; a pair's do not."""
    e = experiments.make("llama2-7b", "8xl40s", {"kind": "serve"}, [f"tensor_parallel:degree={degree}"])
    assert any("one measured server" in note for note in predict(e).notes) == said
