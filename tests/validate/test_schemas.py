"""Rows of the operator schemas: what they become, and what is refused by name."""

import os
from pathlib import Path

import pytest

from ridgeline import catalog
from ridgeline.graph import Op
from ridgeline.predict.operators.kernel import op_time
from ridgeline.spec.errors import UserError
from ridgeline.validate import attention_rows as attention
from ridgeline.validate import collective_rows as collectives
from ridgeline.validate import gemm_rows as gemm
from ridgeline.validate.csv_table import BadCell, CsvRow, read_table


def row(**cells):
    return CsvRow(2, {k: str(v) for k, v in cells.items()})


def matmul(**cells):
    return row(**{"device": "h100-sxm", "dtype": "bf16", "m": 16, "n": 4096, "k": 4096, "seconds": 2e-5, **cells})


def heads(**cells):
    base = {
        "device": "h100-sxm", "phase": "decode", "dtype": "bf16", "kv_dtype": "bf16", "batch": 4, "q_len": 1,
        "kv_len": 4096, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128, "causal": 1, "seconds": 2e-5,
        "source": "x/vllm",
    }  # fmt: skip
    return row(**{**base, **cells})


def sent(**cells):
    base = {"device": "a100-80g-sxm", "op": "all_reduce", "dtype": "half", "ranks": 8, "bytes": 1048576,
            "seconds": 4e-5, "link": "intra-node"}  # fmt: skip
    return row(**{**base, **cells})


def test_gemm_rows():
    (case,) = gemm.cases(matmul())
    assert case.group == "h100-sxm bf16"
    assert case.quantity == "seconds"
    assert case.line == 2
    assert abs(case.error) < 0.3
    assert len(case.terms) == 3
    (eight,) = gemm.cases(matmul(dtype="fp8", m=8192))
    product, scaling = gemm.ops(matmul(dtype="fp8", m=8192))[::-1]
    device = catalog.device("h100-sxm")
    assert eight.predicted == pytest.approx(op_time(product, device).seconds + op_time(scaling, device).seconds)
    (narrow,) = gemm.cases(matmul(dtype="int4_wo"))
    assert narrow.group == "h100-sxm bf16/int4"
    assert narrow.predicted < case.predicted


def test_what_the_source_of_a_product_says():
    """Copies of a layer replayed in turn leave small weights in the cache; DeepGEMM's own benchmarks scale nothing."""
    weights = 2.0 * 4096 * 4096
    assert gemm.ops(matmul())[0].reuse == 0
    assert gemm.ops(matmul(source="aiconfigurator-0.12/vllm"))[0].reuse == 6 * weights
    assert gemm.ops(matmul(source="aiconfigurator-0.12/trtllm"))[0].reuse == 2 * weights  # 50 MB of cache
    assert gemm.ops(matmul(source="aiconfigurator-0.12/trtllm", n=512))[0].reuse == 5 * weights / 8
    assert len(gemm.ops(matmul(dtype="fp8"))) == 2
    assert len(gemm.ops(matmul(dtype="fp8", source="deepgemm"))) == 1


def test_attention_rows():
    (case,) = attention.cases(heads())
    assert case.group == "h100-sxm decode bf16"
    (other,) = attention.cases(heads(source="a/trtllm"))
    assert other.predicted != case.predicted
    (prefill,) = attention.cases(heads(phase="prefill", q_len=4096))
    assert prefill.group == "h100-sxm prefill bf16"
    assert prefill.predicted > case.predicted
    assert attention.op_of(heads(kv_dtype="fp8")).kv_dtype == "fp8"


def test_collective_rows():
    (case,) = collectives.cases(sent())
    assert case.group == "a100-80g-sxm all_reduce"
    assert abs(case.error) < 0.3
    (far,) = collectives.cases(sent(ranks=16, link="inter-node", bytes=1e9))
    (near,) = collectives.cases(sent(bytes=1e9))
    assert far.predicted > near.predicted
    assert isinstance(collectives.op_of(sent(op="AllGather")), Op)


@pytest.mark.parametrize(("link", "direct"), [
    ("intra-node (PCIe, P2P)", True), ("intra-node (PCIe 4.0, patched driver: peer-to-peer)", True),
    ("intra-node (PCIe, no P2P)", False), ("PCIe, P2P disabled", False),
    ("intra-node (PCIe, without peer-to-peer)", False), ("PCIe through host memory", False),
    ("pcie", False), ("intra-node", False),
])  # fmt: skip
def test_rows_say_whether_cards_reach_each_other(link, direct):
    cluster = collectives.cluster_of(sent(device="rtx4090", link=link))
    assert cluster.device.link.p2p is direct
    assert cluster.nodes == 1


def test_rows_say_what_is_between_nodes():
    cluster = collectives.cluster_of(sent(ranks=32, devices_per_node=8, link="inter-node 8x400Gb/s"))
    assert (cluster.nodes, cluster.devices_per_node) == (4, 8)
    assert cluster.device.network.bandwidth == 50e9
    shared = collectives.cluster_of(sent(ranks=8, devices_per_node=4, link="inter-node 2x200Gb/s"))
    assert shared.device.network.bandwidth == 12.5e9


@pytest.mark.parametrize(
    ("make", "schema", "cells", "named"),
    [
        (matmul, gemm, {"m": "x"}, "'m'"),
        (matmul, gemm, {"m": 0}, "'m'"),
        (matmul, gemm, {"n": 2.5}, "'n'"),
        (matmul, gemm, {"dtype": "posit8"}, "'dtype'"),
        (matmul, gemm, {"seconds": 0}, "'seconds'"),
        (matmul, gemm, {"seconds": "nan"}, "'seconds'"),
        (heads, attention, {"n_kv_heads": 5}, "'n_kv_heads'"),
        (heads, attention, {"q_len": 5000}, "'kv_len'"),
        (heads, attention, {"phase": "backward"}, "'phase'"),
        (heads, attention, {"kv_dtype": "?!"}, "'kv_dtype'"),
        (sent, collectives, {"op": "gossip"}, "'op'"),
        (sent, collectives, {"ranks": 1}, "'ranks'"),
        (sent, collectives, {"bytes": -1}, "'bytes'"),
    ],
)
def test_bad_cells_are_named(make, schema, cells, named):
    with pytest.raises(BadCell, match=named):
        schema.cases(make(**cells))


def test_unknown_devices_are_a_users_mistake():
    for make, schema in ((matmul, gemm), (heads, attention), (sent, collectives)):
        with pytest.raises(UserError, match="unknown device"):
            schema.cases(make(device="abacus"))


DATA = os.environ.get("RIDGELINE_DATA", "")


@pytest.mark.skipif(not DATA, reason="RIDGELINE_DATA names no directory of measurements")
@pytest.mark.parametrize(("schema", "limit"), [(gemm, 0.09), (attention, 0.12), (collectives, 0.12)])
def test_open_measurements(schema, limit):
    path = Path(DATA) / f"{schema.NAME}.csv"
    if not path.is_file():
        pytest.skip(f"no {path.name}")
    groups: dict[str, list[float]] = {}
    for r in list(read_table(path))[::5]:
        for case in schema.cases(r):
            groups.setdefault(case.group, []).append(abs(case.error))
    for name, errors in groups.items():
        assert sum(errors) / len(errors) < (0.20 if name.startswith("l40s") else limit), name
