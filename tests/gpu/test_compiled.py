"""The Triton kernels compiled for GPUs, without one: what the compiler made of them.

In processes of their own, because the suite runs Triton in its interpreter. Times are not tested: machines are busy.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from ridgeline.nn.kernels import skinny
from ridgeline.nn.kernels.skinny import LAUNCHES
from ridgeline.nn.kernels.target import SHARED

LONGEST = 5000
"""Most instructions of a kernel, in place of the seconds of its compilation, which depend on the machine: kernels of
9000 and more kept first requests waiting for 5 s to minutes (``gpu_aot.json``, before); a thousand take less than one
s."""
FLASH = ("_attend_spans", "_queries_backward", "_keys_backward")
"""Attention in training."""
LORA = ("_lora_shrink", "_lora_expand")
"""Adapters of a step's rows."""
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "compile_kernels.py"


def compiled(folder, *args):
    return run(SCRIPT, folder, "--json", *args)


def run(script, folder, *args):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    command = [sys.executable, str(script), *args]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def hopper(once, tmp_path_factory):
    """One shape of each important kernel for compute capability 9.0."""
    return once("hopper", lambda: compiled(tmp_path_factory.mktemp("triton"), "--quick", "--capabilities", "90"))


@pytest.fixture(scope="module")
def ada(once, tmp_path_factory):
    """A few for 8.9: of the devices, that with the least shared memory."""
    few = ("--only", "int4 rows=4 ", "flash Gemma 2 9B", "row 28672x4096 bf16", "--capabilities", "89")
    return once("ada", lambda: compiled(tmp_path_factory.mktemp("triton"), *few))


def only(rows, case, kernel):
    found = [r for r in rows if case in r["case"] and r["kernel"] == kernel]
    assert len(found) == 1, [r["case"] for r in rows]
    return found[0]


def no_waste(rows):
    assert len(rows) > 8
    for r in rows:
        assert r["spilled"] == 0, r
        assert r["shared_pairs"] == 0, r
        assert r["instructions"] < LONGEST, r
        assert r["shared"] <= SHARED[r["capability"]], r
        assert (64 << 10) // (32 * r["warps"] * r["registers"]) * r["warps"] >= 8, r  # a processor runs as many warps
        assert (r["waits"], r["early_accesses"]) == (int(r["early"]), 0), r
        if r["kernel"] in ("_attend", "_attend_few", "_few", "_tiles", "_product_of_rows", *FLASH):
            assert r["tensor"] > 0, r
            assert r["asynchronous"] > 0, r
        elif r["kernel"] in LORA:
            assert (r["tensor"] > 0) == ("fp32" not in r["case"]), r  # which are not rounded to fewer bits
            assert (r["asynchronous"] > 0) == (r["kernel"] == "_lora_shrink"), r
            assert any(int(bits) >= 64 for bits in r["loads"]), r
        elif r["kernel"] not in ("_row", "_merge", "_write"):
            assert any(int(bits) >= 64 for bits in r["loads"]), r


def test_nothing_is_spilled_and_products_run_on_tensor_cores(hopper):
    no_waste(hopper)


def test_a_tile_of_keys_takes_few_instructions(hopper):
    """64 keys of 128 numbers are 16 KB of each, keys and values: with a processor's share of 25 GB/s some 2300 cycles,
    in which four schedulers issue one instruction each for one of its four warps."""
    plain = [r for r in hopper if r["case"] == "paged B=64 heads=32/8 of 128, 4096 tokens"]
    assert [r["loop"] <= 500 for r in plain] == [True]
    nibbles = only(hopper, "4096 tokens, int4", "_attend_few")
    assert nibbles["loop"] <= 2 * 650  # 128 keys of a quarter of the bytes: 2 x 600 cycles
    chunk = only(hopper, "1024 new", "_attend")
    assert chunk["loop"] <= 600  # eight warps, 128 rows and 64 keys: 4.2 MFLOP


@pytest.mark.parametrize(("kernel", "products"), [("_attend_spans", 2), ("_queries_backward", 3),
                                                  ("_keys_backward", 4)])  # fmt: skip
def test_attention_in_training_takes_few_instructions(hopper, kernel, products):
    """MPT's: a score with heads of 128 takes an H100 ``products`` x 256 operations of the 989.4e12 a second that its
    132 processors of 1.755 GHz make, and its schedulers, which issue an instruction for 128 threads a cycle, at most
    1.5 times as long, masks included, which most tiles do without. Its rows are read 128 bits at a time."""
    (r,) = [r for r in hopper if r["case"].startswith("flash MPT 7B") and r["kernel"] == kernel]
    size, tile = (128, 64) if kernel != "_keys_backward" else (128, 32)
    cycles = products * 2 * 128 / (989.4e12 / 132 / 1.755e9)
    assert r["loop"] * 32 * r["warps"] / (size * tile) / 128 < 1.5 * cycles
    assert r["loads"]["128"] >= 4


def test_a_code_of_a_weight_takes_few_instructions(hopper):
    """A thread's instructions for each code that it multiplies."""
    one = only(hopper, "int4 rows=1 ", "_few")
    assert one["loop"] / (16 * one["warps"] * 512 / (32 * one["warps"])) < 2.5  # with the product
    many = only(hopper, "int4 rows=64 ", "_tiles")
    assert many["loop"] / (128 * 256 / (32 * many["warps"])) < 5  # scales are applied twice to a block of 512
    assert many["shared"] <= 163 << 10  # also of an A100
    # 2.5 bytes a code: half of their time, as for float8 codes below.
    assert only(hopper, "int4 rows=512 ", "_expand")["instructions"] / (8 * 512 / 128) < 11


def test_a_row_is_multiplied_by_few_instructions_and_wide_asynchronous_loads(hopper):
    """Half of the bytes' time at most to issue, as of float8 codes below, also where blocks reach over the edge."""
    found = [r for r in hopper if r["kernel"] == "_product_of_row"]
    assert len(found) == 5
    for r in found:
        width = 1 if "fp8" in r["case"] else 2  # bytes of a weight, of whose rows a block has 1024
        assert r["loop"] / (8 * 1024 / width / (32 * r["warps"])) < 0.5 * 4 * 32 * width / (3350 / 132 / 1.755)  # 8.9
        assert r["loads"]["128"] >= 4
        assert r["asynchronous"] > 0


def test_a_float8_code_takes_few_instructions(hopper):
    """The kernels that write codes take at most half of their bytes' time to issue: a processor's share of 3350 GB/s is
    14.5 bytes a cycle at 1.755 GHz, in which its schedulers issue an instruction for each of 128 threads."""

    def most(moved):
        """A thread's instructions for each number, of which ``moved`` bytes are read and written."""
        return 0.5 * 4 * 32 * moved / (3350 / 132 / 1.755)

    both = only(hopper, "float8 also transposed of 16384", "_encode_transposed")
    assert both["instructions"] / (128 * 64 / (32 * both["warps"])) < most(2 + 2)  # 17.7
    rows = only(hopper, "float8 by rows also transposed", "_encode_both")
    # Two scales for each number. An H100 writes both codes of 16384x16384 at 2.6 TB/s, as with one scale.
    assert rows["instructions"] / (128 * 64 / (32 * rows["warps"])) < 2 * most(2 + 2)
    # Of SwiGLU's gradient, two numbers of 6 bytes for each place of a tile: also two scales, and the gradient itself.
    codes, found = (only(hopper, "swiglu's gradient", kernel) for kernel in ("_encode_gated", "_peaks_of_gated"))
    assert codes["instructions"] / (2 * 128 * 64 / (32 * codes["warps"])) < 2 * most(3 + 2)
    assert found["loop"] / (2 * 64 * 64 / (32 * found["warps"])) < 2 * most(3)


@pytest.mark.parametrize(("capability", "cycle"), [(80, 2039 / 108 / 1.41), (90, 3350 / 132 / 1.755)])
def test_several_rows_of_float8_weights_take_few_instructions(hopper, tmp_path, capability, cycle):
    """Half of the bytes' time at most to issue, on an A100 too, which converts codes by shifts: ``cycle`` is what a
    processor's share of the bandwidth brings in one, in bytes. Codes are copied ahead, 128 bits at a time."""
    given = ("--only", "fp8 rows", "--quick", "--capabilities", str(capability))
    rows = hopper if capability == 90 else compiled(tmp_path, *given)
    rows = [r for r in rows if r["case"].startswith("fp8 ")]  # not of experts
    few, more, all_of_it = (only(rows, f"fp8 rows={n} ", k) for n, k in ((8, "_few"), (16, "_tiles"), (512, "_expand")))

    def most(moved):
        return 0.5 * 4 * 32 * moved / cycle

    assert few["loop"] / (16 * 4 * 128 / (32 * few["warps"])) < most(1)
    if capability < 89:  # others take PyTorch's product in float8
        assert more["loop"] / (64 * 128 / (32 * more["warps"])) < most(1)
        assert all_of_it["instructions"] / (8 * 128 / (32 * all_of_it["warps"])) < most(1 + 2)
    for r in (few, more):
        assert (r["spilled"], r["tensor"] > 0, r["asynchronous"] > 8, r["loads"]["128"] > 8) == (0, True, True, True)
        assert r["shared"] <= 99 << 10  # also of consumer cards


def test_a_few_rows_are_multiplied_by_four_warps_at_a_time(hopper):
    """A weight's bytes take half of their time at most to issue, as of float8 codes above; they are copied 128 bits at
    a time, in so many blocks that a processor's share of the bandwidth, 25 GB/s, finds what it brings in 1.2 us under
    way."""
    found = {r["case"]: r for r in hopper if r["kernel"] == "_product_of_rows"}
    cases = [(m, kind) for m in (16, 64, 128) for kind in ("e4m3", "bf16")]
    assert list(found) == [f"skinny {kind} rows={m} 4096x14336" for m, kind in cases]
    for (m, _), r in zip(cases, found.values(), strict=True):
        how = next(h for h in LAUNCHES if m <= h.rows)
        block = how.outputs * how.bytes
        assert r["tensor"] == block // how.warps * 4 // (64 * 32)  # 64 outputs and 32 bytes of each
        assert r["warpgroup"] == r["tensor"]
        assert r["loop"] * 32 * r["warps"] < 0.5 * 4 * 32 * block / (3350 / 132 / 1.755)
        assert r["loads"]["128"] >= 4
        together = min(SHARED[90] // (r["shared"] + 1024), (64 << 10) // (32 * r["warps"] * r["registers"]))
        programs = min(together, -(-r["grid"][0] * r["grid"][1] // 132))
        assert programs * (how.stages - 2) * block >= 25.4e9 * 1.2e-6  # bytes
        assert how.programs <= together


@pytest.mark.parametrize(("rows", "blocks"), [(8, 8), (512, 23)])
def test_adapters_of_all_rows_are_two_launches(hopper, rows, blocks):
    """Queries, keys and values of Llama 3.1 8B, 16 adapters of rank 8. Few rows: their A and B are read at most once,
    128 bits at a time, and issuing takes at most half of a part's time: its processor's share of the bandwidth is 14.5
    bytes a cycle, and 16 lines of 256 inputs are taken at a time."""
    shrink, expand = (only(hopper, f"lora qkv rank=8 rows={rows} bf16", kernel) for kernel in LORA)
    assert shrink["grid"] == [blocks, 3, 4]
    assert expand["grid"] == [blocks, (4096 + 1024 + 1024) // 128]
    for r in (shrink, expand):
        assert r["registers"] <= 128
        assert r["loads"]["128"] >= 3
    if rows == 8:
        assert shrink["loop"] < 0.5 * 16 * 256 * 2 / (3350 / 132 / 1.755)


def test_rows_and_heads_share_a_program(hopper):
    assert only(hopper, "rotate", "_rotate")["grid"] == [16384]  # rows
    assert only(hopper, "norm backward rms", "_add_norm_backward")["grid"] == [2 * 132]  # of 512 threads, per processor


def test_low_bit_products_and_wide_heads_of_ada(ada):
    """What of their tiles fits its shared memory. Other devices are in :func:`test_every_shape`."""
    (row,) = [r for r in ada if r["case"].startswith("int4")]
    assert row["shared"] <= SHARED.get(89, 99 << 10)
    assert row["tensor"] > 0
    rows = [r for r in ada if r["case"].startswith("flash")]
    assert [r["kernel"] for r in rows] == ["_attend_spans", "_queries_backward", "_keys_backward", "_keys_backward"]
    for r in rows:
        assert (r["spilled"], r["shared"] <= SHARED.get(89, 99 << 10)) == (0, True), r
        assert r["tensor"] > 0
        assert r["asynchronous"] > 0


STARTED_EARLY = {"_product_of_row", "_product_of_rows", "_tiles", "_few", "_add_norm", "_activation", "_write",
                 "_attend", "_attend_few", "_merge", "_rotate", *LORA}  # fmt: skip
"""Kernels of a decode step."""


def test_kernels_of_decode_steps_start_early(hopper):
    """And wait once, before they read or write (:func:`no_waste`): lines that are fetched into the second-level cache
    before that are no access, as nothing depends on them."""
    early = {r["kernel"] for r in hopper if r["early"]}
    assert early >= STARTED_EARLY
    assert early.isdisjoint(r["kernel"] for r in hopper if not r["early"])


def test_no_kernel_starts_early_before_hopper(hopper, ada):
    both = [next(r for r in rows if r["case"].startswith("row 28672x4096 bf16")) for rows in (ada, hopper)]
    assert [(r["capability"], r["early"], r["waits"]) for r in both] == [(89, False, 0), (90, True, 1)]


def test_quick_launches_are_those_of_triton(tmp_path):
    """All arguments of all launches of a served step: the first, the next, which Triton does not see, and by Triton
    alone."""
    found = run(SCRIPT.with_name("host_time.py"), tmp_path, "--check")
    assert found["launches"] > 8


def test_every_kernel_that_is_launched_is_compiled_ahead_of_time():
    """For 8.0, 9.0 and 10.0; those of float8 where the device has it, and one for Hopper alone."""
    jitted, launched = set(), set()
    for file in Path(skinny.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                jitted.add(node.name)
            elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                launched.add(node.value.id)  # kernel[grid]
            elif isinstance(node, ast.IfExp):  # one of two kernels
                launched |= {n.id for n in (node.body, node.orelse) if isinstance(n, ast.Name)}
    held = json.loads((SCRIPT.parents[1] / "results" / "gpu_aot.json").read_text(encoding="utf-8"))["after"]["rows"]
    found = {c: {r["kernel"] for r in held if r["capability"] == c} for c in (80, 90, 100)}
    jitted = {name for name in jitted if name.startswith("_")}  # others are called by these
    assert len(jitted & launched) > 30
    assert jitted & launched <= found[90]
    ours = {"_product_of_rows"}
    assert jitted & launched <= found[100] | ours
    float8 = {name for name in jitted & launched if name.startswith(("_encode", "_peaks"))}
    assert jitted & launched <= found[80] | ours | float8


@pytest.mark.nightly
@pytest.mark.parametrize("capability", ["80", "90", "100"])
def test_every_shape(capability, tmp_path):
    no_waste(compiled(tmp_path, "--capabilities", capability))


NANS = """
import json
import torch
from ridgeline.nn.kernels import gated_difference, relative_update
from ridgeline.nn.kernels.ahead_of_time import compiling

with compiling(90) as found:
    x = torch.empty(64, 64, device="meta")
    gated_difference.gated_weight(x, x, x, x, x, (-0.1, 1.1))
    gated_difference.gated_gradients(x, x, x, x, (x, x), (-0.1, 1.1))
    relative_update.update_matrix(x, x, x[0], x[0], 0.3, 1e-30, 1e-3, 1e-3)
    relative_update.update_vector(x[0], x[0], x[0], 0.3, 1e-30, 1e-3, 1e-3)
print(json.dumps({call.name: call.kernel.asm["ptx"] for call in found}))
"""


def test_what_is_cut_stays_nan(tmp_path):
    """A GPU's minimum and maximum leave NaN out, unlike those of Triton's interpreter: gates and sizes of updates that
    are NaN must show."""
    (tmp_path / "nans.py").write_text(NANS)
    found = run(tmp_path / "nans.py", tmp_path)
    cut = {name: {kind for kind in ("min.NaN.f32", "max.NaN.f32") if kind in ptx} for name, ptx in found.items()}
    assert cut["_gated_weight"] == cut["_gated_gradients"] == {"min.NaN.f32", "max.NaN.f32"}
    assert cut["_update_matrix"] == cut["_update_vector"] == {"max.NaN.f32"}
