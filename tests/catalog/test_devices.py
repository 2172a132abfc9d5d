"""Catalog devices: sources, relations between them that hold in silicon, clusters, and this machine's profile."""

import re
import subprocess
import sys
from importlib.resources import files

import pytest

from ridgeline import catalog
from ridgeline.spec.device import Device
from ridgeline.spec.errors import UserError

EXPECTED = {
    "a100-40g-sxm", "a100-80g-sxm", "a100-80g-pcie", "a100-40g-pcie", "a800-80g", "h100-sxm", "h100-pcie",
    "h100-96g-hbm2e-500w", "h200-sxm", "h800", "h20", "b200", "l40s", "l4", "t4", "a6000", "a10g", "v100-16g-sxm",
    "v100-32g-sxm", "rtx4090", "rtx3090", "mi250x", "mi300x", "xeon",
}  # fmt: skip


def text_of(name):
    return (files("ridgeline.catalog") / "devices" / f"{name}.toml").read_text(encoding="utf-8")


def test_the_names_that_data_sets_use_are_known():
    assert set(catalog.devices()) >= EXPECTED


ENGINES = ("dfx-u280", "flexflow-16x16")
"""Accelerators with a dataflow engine: 16-bit arithmetic alone, and rates of 2017 to 2022."""


@pytest.mark.parametrize("name", catalog.devices())
def test_file(name):
    device = catalog.device(name)
    assert device.name == name
    assert device.title
    assert device.vendor
    assert 2017 <= device.year <= 2026
    assert device.sm_count > 0
    assert device.watts > 0
    assert device.l2_bytes >= 1e6 or name in ENGINES
    assert device.source.strip()
    assert device.network is not None or name in ENGINES
    for link in (device.link, device.host_link, device.network):
        assert link is None or link.source
    assert device.kind == "cpu" or (device.link and device.host_link) or name in ENGINES


@pytest.mark.parametrize("name", catalog.devices())
def test_every_figure_has_its_source_beside_it(name):
    in_link = False
    cited = set()
    for line in text_of(name).splitlines():
        if line.startswith("["):
            in_link = "link" in line or "network" in line
        figure = re.match(r"(\w+) = [\d.]", line)
        if figure and not in_link and figure[1] != "year":
            assert "#" in line, f"{name}: {line}"
            cited |= set(re.findall(r"\[(\d)\]", line))
    listed = set(re.findall(r"^\[(\d)\] ", catalog.device(name).source, flags=re.M))
    assert cited <= listed, f"{name} cites a source that it does not list"


@pytest.mark.parametrize("name", sorted(set(catalog.devices()) - set(ENGINES)))
def test_peaks_are_plausible(name):
    device = catalog.device(name)
    peak = device.peak_flops
    assert 1e12 < peak["fp32"] < 2e14
    if "bf16" in peak:
        assert peak["bf16"] == peak["fp16"]
        assert peak["bf16"] > peak["fp32"]
    if "fp8" in peak:
        assert peak["fp8"] == pytest.approx(2 * peak["bf16"], rel=0.02)
    if "tf32" in peak:
        assert peak["tf32"] <= peak["bf16"] / 1.9
    if "fp16" in peak and device.kind == "gpu":
        ridge = peak["fp16"] / device.memory_bandwidth  # FLOP per byte
        assert 30 < ridge < 600
    assert device.reserved_bytes < 0.1 * device.memory_bytes


@pytest.mark.parametrize(
    ("name", "sm", "flops_per_sm_cycle", "boost_ghz"),
    [
        ("a100-80g-sxm", 108, 2048, 1.410),
        ("h100-sxm", 132, 4096, 1.830),
        ("v100-32g-sxm", 80, 1024, 1.530),
        ("t4", 40, 1024, 1.590),
        ("rtx4090", 128, 512, 2.520),
        ("rtx3090", 82, 512, 1.695),
        ("a6000", 84, 1024, 1.800),
        ("a10g", 80, 512, 1.710),
        ("l40s", 142, 1024, 2.490),
    ],
)
def test_dense_fp16_is_cores_times_clock(name, sm, flops_per_sm_cycle, boost_ghz):
    """A sparse figure, a wrong accumulator or a wrong SM count would each be off by a factor."""
    device = catalog.device(name)
    assert device.sm_count == sm
    assert device.peak_flops["fp16"] == pytest.approx(sm * flops_per_sm_cycle * boost_ghz * 1e9, rel=0.02)


def but_for(a, b, *fields):
    drop = {"name", "title", "source", "year", "price_per_hour", *fields}
    return a.model_dump(exclude=drop) == b.model_dump(exclude=drop)


def test_export_versions_differ_in_their_links():
    a100, a800 = catalog.device("a100-80g-sxm"), catalog.device("a800-80g")
    assert but_for(a100, a800, "link", "host")
    assert (a100.link.bandwidth, a800.link.bandwidth) == (300e9, 200e9)
    h100, h800 = catalog.device("h100-sxm"), catalog.device("h800")
    assert but_for(h100, h800, "link", "peak_flops", "host")
    assert h800.link.bandwidth == 200e9 < h100.link.bandwidth == 450e9
    differing = {k for k in h100.peak_flops if h100.peak_flops[k] != h800.peak_flops[k]}
    assert differing == {"fp64"}


def test_hopper_variants_share_their_compute():
    h100 = catalog.device("h100-sxm")
    for name in ("h200-sxm", "h100-96g-hbm2e-500w"):
        assert catalog.device(name).peak_flops == h100.peak_flops
    assert catalog.device("h200-sxm").memory_bandwidth == 4.8e12
    part = catalog.device("h100-96g-hbm2e-500w")
    assert (part.memory_bandwidth, part.watts) == (2.4e12, 500)
    assert part.memory_bytes > h100.memory_bytes
    assert catalog.device("h20").peak_flops["bf16"] < 0.2 * h100.peak_flops["bf16"]
    assert catalog.device("h20").link == h100.link


def test_what_a_part_lacks_is_absent():
    for name in ("v100-16g-sxm", "v100-32g-sxm", "t4", "xeon"):
        assert not {"bf16", "tf32", "fp8"} & set(catalog.device(name).peak_flops)
    for name in ("a100-80g-sxm", "a800-80g", "rtx3090", "a6000"):
        assert "fp8" not in catalog.device(name).peak_flops
    assert catalog.device("xeon").link is None
    assert catalog.device("xeon").kind == "cpu"


def test_geforce_cards_have_no_peer_access_over_pcie():
    for name in ("rtx4090", "rtx3090"):
        assert not catalog.device(name).link.p2p
    for name in ("l40s", "a6000", "h100-sxm"):
        assert catalog.device(name).link.p2p


# ---- names and clusters -----------------------------------------------------------------------------------------


def test_a_later_pcie_is_no_slower_between_processors():
    """All cards over PCIe say what is left of it beyond four, and those with peer access no less on a later one."""
    left = {name: dict(catalog.device(name).link.spans).get(4)
            for name in ("t4", "v100-32g-pcie", "a100-80g-pcie", "l4", "h100-pcie", "rtx3090", "rtx4090")}  # fmt: skip
    assert None not in left.values()
    assert left["t4"] == left["v100-32g-pcie"] <= left["a100-80g-pcie"] <= left["h100-pcie"]


def test_aliases_point_at_devices():
    for alias, name in catalog.DEVICE_ALIASES.items():
        assert alias not in catalog.devices()
        assert catalog.device(alias).name == name
    assert catalog.device("H100").name == "h100-sxm"


def test_cluster():
    c = catalog.cluster("4x8xa100-80g-sxm")
    assert (c.nodes, c.devices_per_node, c.device.name, c.size) == (4, 8, "a100-80g-sxm", 32)
    assert c.label == "4x8xa100-80g-sxm"
    assert catalog.cluster("8x4090").label == "8xrtx4090"
    assert catalog.cluster("a800").size == 1


@pytest.mark.parametrize("text", ["0xa100", "4x0xa100", "0x8xa100", "", "  "])
def test_cluster_without_devices_is_refused(text):
    with pytest.raises(UserError, match="cluster"):
        catalog.cluster(text)


def test_unknown_names_get_the_nearest():
    with pytest.raises(UserError, match="unknown device 'a100-80g-smx'") as e:
        catalog.cluster("8xa100-80g-smx")
    assert "a100-80g-sxm" in e.value.fix
    with pytest.raises(UserError, match="unknown device 'rtx'") as e:
        catalog.device("rtx")
    assert "rtx4090" in e.value.fix
    with pytest.raises(UserError, match="cannot read device file"):
        catalog.device("../devices/xeon")  # a path, whatever it resembles
    with pytest.raises(UserError, match="unknown device"):
        catalog.device("")


# ---- device files -----------------------------------------------------------------------------------------------

MINIMAL = """
memory_bytes = 8e9
memory_bandwidth = 100e9
[peak_flops]
fp32 = 1e12
"""


def read(tmp_path, text):
    path = tmp_path / "box.toml"
    path.write_text(text, encoding="utf-8")
    return catalog.device(str(path))


def test_device_file(tmp_path):
    assert read(tmp_path, MINIMAL).name == "box"
    assert read(tmp_path, 'name = "mine"\n' + MINIMAL).name == "mine"
    assert catalog.cluster(f"2x{tmp_path / 'box.toml'}").size == 2


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("memory_bandwith = 1\n" + MINIMAL, r"unknown key 'memory_bandwith' in .*box\.toml", "memory_bandwidth"),
        (MINIMAL + "[link]\nname='x'\nbandwith=1\nlatency=1", r"unknown key 'link\.bandwith'", "link.bandwidth"),
        (MINIMAL + "[rates.'gemm.fp32']\nflops = 1.0", r"unknown key 'rates\.gemm\.fp32\.flops'", "flop_rate"),
        (MINIMAL + "fp61 = 1e12", r"unknown dtype 'fp61' in .*box\.toml, table 'peak_flops'", "fp64"),
        (MINIMAL.replace("8e9", "'8e9'"), r"key 'memory_bytes' in .*box\.toml: input should be a valid number", ""),
        (MINIMAL.replace("8e9", "true"), r"key 'memory_bytes' in .*: input should be a valid number.*, not True", ""),
        (MINIMAL.replace("8e9", "nan"), r"key 'memory_bytes' in .* is nan", "above zero"),
        (MINIMAL.replace("1e12", "0"), r"key 'peak_flops\.fp32' in .* is 0", "above zero"),
        (MINIMAL.replace("1e12", "-inf"), r"key 'peak_flops\.fp32' in .* is -inf", "above zero"),
        (MINIMAL.replace("fp32 = 1e12", ""), r"table 'peak_flops' in .* is empty", "fp32"),
        ("launch_latency = -1\n" + MINIMAL, r"key 'launch_latency' in .* is -1", "0 or above"),
        (MINIMAL + "[host_link]\nname='x'\nbandwidth=0\nlatency=0", r"'host_link\.bandwidth' in .* is 0", "above"),
        (MINIMAL + "[link]\nname='x'\nbandwidth=1e9\nlatency=inf", r"'link\.latency' in .* is inf", "0 or above"),
        (MINIMAL + "[network]\nname='x'\nbandwidth=1e9\nlatency=-1e-6", r"'network\.latency' in .* is -1e", "0 or"),
        (MINIMAL + "[disk]\nname='x'\nbandwidth=0\nlatency=0", r"'disk\.bandwidth' in .* is 0", "above zero"),
        ("watts = nan\n" + MINIMAL, r"key 'watts' in .* is nan", "0 or above"),
        ("clock = -1\n" + MINIMAL, r"key 'clock' in .* is -1", "0 or above"),
        ("sm_count = -3\n" + MINIMAL, r"key 'sm_count' in .* is -3", "0 or above"),
        (MINIMAL + "[host]\nname='x'\ncores=4\nmemory_bytes=inf\nmemory_bandwidth=1e9", r"'host\.memory_bytes' .* inf",
         "finite"),
        (MINIMAL.replace("memory_bytes = 8e9", ""), r"box\.toml has no key 'memory_bytes'", "add it"),
        ("kind = 'tpu'\n" + MINIMAL, r"key 'kind' in .*: input should be 'gpu' or 'cpu', not 'tpu'", ""),
        ("peak_flops = 3", r"box\.toml", ""),
        (MINIMAL.replace("bandwidth", "bandwith"), r"unknown key 'memory_bandwith' in", "memory_bandwidth"),
        ("memory_bytes = ", r"box\.toml is not valid TOML: Invalid value", ""),
    ],
)  # fmt: skip
def test_malformed_device_file(tmp_path, text, what, fix):
    with pytest.raises(UserError, match=what) as e:
        read(tmp_path, text)
    assert fix in e.value.fix


def test_missing_device_file(tmp_path):
    with pytest.raises(UserError, match=r"cannot read device file .*nowhere\.toml: No such file"):
        catalog.device(str(tmp_path / "nowhere.toml"))
    with pytest.raises(UserError, match="cannot read device file"):
        catalog.device(str(tmp_path))


# ---- this machine -----------------------------------------------------------------------------------------------


def test_local_before_the_probe(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path))
    with pytest.raises(UserError, match="no profile of this machine yet") as e:
        catalog.cluster("2xlocal")
    assert "ridgeline probe" in e.value.fix


def test_local_round_trip(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path / "new"))
    rates = {"gemm.fp32": {"latency": 2e-6, "flop_rate": 1.5e11, "byte_rate": 2e10}}
    device = Device.model_validate(
        {**catalog.device("xeon").model_dump(), "name": "local", "rates": rates, "ranks": {"2": rates}}
    )
    path = catalog.save_device(device, "probe")
    assert path == tmp_path / "new" / "config" / "devices" / "local.toml"
    assert catalog.device("local") == device == catalog.local_device()
    assert catalog.cluster("2xlocal").size == 2
    again = device.model_copy(update={"watts": 99.0})
    catalog.save_device(again)
    assert catalog.local_device().watts == 99.0
    assert [p.name for p in path.parent.iterdir()] == ["local.toml"]  # nothing temporary stays


def test_failed_write_keeps_the_old_profile(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path))
    catalog.save_device(catalog.device("xeon").model_copy(update={"name": "local"}))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(UserError, match=r"cannot write .*No space left"):
        catalog.save_device(catalog.device("l4").model_copy(update={"name": "local"}))
    assert catalog.local_device().kind == "cpu"
    assert [p.name for p in (tmp_path / "config" / "devices").iterdir()] == ["local.toml"]


def test_a_calibrated_profile_goes_before_the_catalog(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path))
    plain = catalog.device("h100-sxm")
    tuned = plain.model_copy(update={"source": "calibrated here", "memory_bandwidth": 3.2e12})
    path = catalog.save_device(tuned)
    assert path.name == "h100-sxm.toml"
    assert catalog.device("h100") == tuned
    assert catalog.cluster("8xh100-sxm").device == tuned
    path.unlink()
    assert catalog.device("h100-sxm") == plain


def test_where_the_local_profile_lies(tmp_path, monkeypatch):
    monkeypatch.delenv("RIDGELINE_HOME", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert catalog.local_device_path() == tmp_path / "xdg" / "ridgeline" / "devices" / "local.toml"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert catalog.local_device_path() == tmp_path / ".config" / "ridgeline" / "devices" / "local.toml"


def test_import_is_light():
    """Importing the catalog loads neither torch nor pydantic; a lookup never loads torch."""
    code = (
        "import sys, ridgeline.catalog as c; assert not {'torch', 'pydantic', 'numpy'} & set(sys.modules);"
        "c.cluster('8xa800'); c.model('llama2-7b'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(p for p in sys.path if p)})


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        ("[[4]]", "spans.0.1"),
        ("[[4, -1.0]]", "greater than 0"),
        ("[[4, 1e9], [2, 1e9]]", "must rise"),
        ("[4, 1e9]", "valid tuple"),
        ("[[4, inf]]", "cannot have more bandwidth"),
        ("[[4, 99e9]]", "cannot have more bandwidth"),
        ("[[2, 1e9], [4, 2e9]]", "cannot have more bandwidth"),
    ],
)
def test_bandwidths_of_larger_groups_are_checked(tmp_path, spans, reason):
    path = tmp_path / "card.toml"
    path.write_text(re.sub(r"(?m)^spans = .*", f"spans = {spans}", text_of("rtx4090")), encoding="utf-8")
    with pytest.raises(UserError, match=reason) as e:
        catalog.device(str(path))
    assert "value error" not in str(e.value)
    assert "{" not in str(e.value)
