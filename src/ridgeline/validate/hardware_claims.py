"""Published claims of hardware designs beside what the models here give, with the reason for each difference."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import fmean, geometric_mean
from typing import Any

from ridgeline import catalog
from ridgeline.catalog import chips
from ridgeline.hardware.area import die_mm2, sram_mm2, total_mm2, transistors
from ridgeline.hardware.cost import cost, verdict
from ridgeline.hardware.device import chip_device
from ridgeline.predict import predict
from ridgeline.predict.operators import unrolled
from ridgeline.report.table import Column, Table
from ridgeline.report.units import percent, seconds
from ridgeline.spec.chip import Chip
from ridgeline.spec.device import Cluster, Device
from ridgeline.validate import hardware_figures as published
from ridgeline.validate.claim import Claim
from ridgeline.validate.hardware_measured import measured


def claims() -> Iterator[Claim]:
    """All claims, work by work."""
    yield from areas()
    yield from dollars()
    yield from designs()
    yield from cores()
    yield from bandwidths()
    yield from buffers()
    yield from layers()
    yield from measured()
    yield from dfx()
    yield from flexflow()
    yield from nlp_fast()


# ---- LLMCompass -------------------------------------------------------------------------------------------------

_LLMCOMPASS = "LLMCompass"
_DILUTED = "LLMCompass adds 0.27 ms of PyTorch's overheads to every layer of every pass, which no chip shortens"


def areas() -> Iterator[Claim]:
    """Die areas: the designs', and of dies that the constants were and were not fitted on."""
    for name, mm2 in published.AREAS.items():
        yield Claim(_LLMCOMPASS, f"die of {name}", mm2, total_mm2(chips.chip(name)), "mm²")
    for name, blocks in (("ga100", published.GA100_BLOCKS), ("aldebaran", published.ALDEBARAN_BLOCKS)):
        ours = die_mm2(chips.chip(name))
        for block, mm2 in blocks.items():
            yield Claim("die photographs", f"{name}, {block}", mm2, ours[block], "mm²", "in sample: fitted on this die")
    ours_out = {
        "128 x 128 bf16 array, TPU v4i": 128 * 128 * transistors("bf16") / chips.process("n7").density,
        "128 MB of scratchpad, TPU v4i": sram_mm2(128 * 2**20, chips.process("n7")),
        "GH100": total_mm2(chips.chip("h100-sxm")),
    }
    why = {
        "128 x 128 bf16 array, TPU v4i": "accumulators and pipeline registers are not counted",
        "128 MB of scratchpad, TPU v4i": "scratchpads are denser than caches",
        "GH100": "video, PCIe and what is not modeled; out of sample",
    }
    for name, mm2 in published.OUT_OF_SAMPLE.items():
        yield Claim("out of sample", name, mm2, ours_out[name], "mm²", why[name])


def dollars() -> Iterator[Claim]:
    """Dollars of table IV, and both verdicts on both designs."""
    paper, corrected = chips.prices("paper"), chips.prices("2023-10")
    base = chips.chip("ga100")
    for name, value in published.DIE_DOLLARS.items():
        yield Claim(_LLMCOMPASS, f"die of {name}", value, cost(chips.chip(name), paper, "none").die, "$",
                    "no yield: every die counts")  # fmt: skip
    for name, speed, ratios in (
        ("llmcompass-latency", 0.95, (1.06, 1.06)),
        ("llmcompass-throughput", 1.42, (3.41, 0.74)),
    ):
        for at, ratio in zip((paper, corrected), ratios, strict=True):
            found = verdict(speed, cost(chips.chip(name), at, "none"), cost(base, at, "none"))
            why = "" if at is paper else "after the authors' correction of the DDR5 price; computed, not published"
            yield Claim(
                _LLMCOMPASS, f"performance per dollar of {name}, prices: {at.date}", ratio, found.ratio, "x", why
            )


def designs() -> Iterator[Claim]:
    """Figures 10 and 12: both designs through the predictor, as it is and with LLMCompass's added overheads."""
    full = "its simulator reads memory at all of its datasheet's rate, products on an A100 at 75 %"
    for extra, said, why in ((0.0, "", _DILUTED), (published.OVERHEAD, ", with its overheads", "")):
        twelve = figure_12(extra)
        yield _grid("10", said, published.LATENCY_DESIGN, figure_10(extra), "x", why)
        yield _grid("12b", said, published.THROUGHPUT_DESIGN, [ratio for ratio, _ in twelve], "x", why)
        yield _grid("12a", said, published.THROUGHPUT, [rate for _, rate in twelve], "tokens/s", full)
    at_full_rate = [rate for _, rate in figure_12(full=True)]
    yield _grid("12a", ", at all of the memory's rate", published.THROUGHPUT, at_full_rate, "tokens/s", "")


def _grid(figure: str, said: str, grid: tuple[tuple[float, ...], ...], ours: list[float], unit: str, why: str) -> Claim:
    """The geometric mean of a figure's cells, with the mean error of a cell."""
    theirs = [float(x) for row in grid for x in row]
    off = 100 * fmean(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))
    because = f"simulated, mean error of {len(theirs)} cells {off:.1f} %" + (f"; {why}" if why else "")
    return Claim(_LLMCOMPASS, f"figure {figure}, geometric mean{said}", geometric_mean(theirs), geometric_mean(ours),
                 unit, because)  # fmt: skip


def figure_10(extra: float = 0.0) -> list[float]:
    """Speed of the latency design relative to the GA100, cell by cell: 4 chips, batch 16, 48 layers."""
    out = []
    for prompt in published.INPUTS:
        for output in published.OUTPUTS:
            base, own = (_generation(chips.chip(n), 4, 48, 16, prompt, output) for n in ("ga100", "llmcompass-latency"))
            added = extra * 48 * output
            out.append((base + added) / (own + added))
    return out


def figure_12(extra: float = 0.0, full: bool = False) -> list[tuple[float, float]]:
    """(Throughput of the throughput design relative to the GA100, its tokens/s), cell by cell: 12 layers on one chip,
    each with the largest batch that LLMCompass's formula gives. ``full``: products read memory at all of its rate."""
    devices = {name: chip_device(chips.chip(name)) for name in ("ga100", "llmcompass-throughput")}
    if full:
        devices = {name: _at_full_rate(d) for name, d in devices.items()}
    out = []
    for prompt in published.INPUTS:
        for output in published.OUTPUTS:
            rate = {}
            for name, room in (("ga100", 80e9), ("llmcompass-throughput", 512e9)):
                batch = int((room - 2 * 12 * 12 * 12288**2) // (56 * (prompt + output) * 12288))
                seconds = _generation(devices[name], 1, 12, batch, prompt, output) + extra * 12 * output
                rate[name] = batch * output / seconds
            out.append((rate["llmcompass-throughput"] / rate["ga100"], rate["llmcompass-throughput"]))
    return out


def _at_full_rate(d: Device) -> Device:
    e = d.efficiency or catalog.efficiency(d)
    gemm = {dtype: g.model_copy(update={"memory_share": 1.0}) for dtype, g in e.gemm.items()}
    return d.model_copy(update={"efficiency": e.model_copy(update={"gemm": gemm})})


def cores() -> Iterator[Claim]:
    """Figure 7: GA100 (B) with a quarter of the arithmetic (A), and with fewer, larger cores (C to E)."""
    base = chips.chip("ga100")
    first, each = _layer(base)
    for name, figure in published.CORES.items():
        chip = _cores(base, *figure.shape)
        own_first, own_each = _layer(chip)
        why = ""
        if name in ("C", "D", "E"):
            why = "its mapper leaves few large arrays idle more often than a library that balances waves"
        yield Claim(_LLMCOMPASS, f"figure 7, area of {name} relative to the GA100", figure.area,
                    total_mm2(chip) / total_mm2(base), "x")  # fmt: skip
        yield Claim(_LLMCOMPASS, f"figure 7, prefill of {name} relative to the GA100", figure.prefill,
                    own_first / first, "x", why)  # fmt: skip
        yield Claim(_LLMCOMPASS, f"figure 7, decode of {name} relative to the GA100", figure.decode,
                    own_each / each, "x", why)  # fmt: skip


def bandwidths() -> Iterator[Claim]:
    """Figure 8: GA100 with 400 to 3200 GB/s, relative to 2000."""
    base = chips.chip("ga100")

    def at(gigabytes: int) -> tuple[float, float]:
        memory = base.memory.model_copy(update={"channel_bandwidth": gigabytes * 1e9 / 5})
        return _layer(base.model_copy(update={"memory": memory, "name": f"ga100-{gigabytes}"}))

    middle = at(2000)
    for rate, theirs in published.BANDWIDTHS.items():
        own = at(rate)
        yield Claim(
            _LLMCOMPASS, f"figure 8, prefill at {rate} GB/s relative to 2000", theirs[0], own[0] / middle[0], "x",
            "plain attention's scores pass through memory here more often" if rate < 800 else "",
        )  # fmt: skip
        for extra, said in ((0.0, ""), (published.OVERHEAD, ", with its overheads")):
            yield Claim(_LLMCOMPASS, f"figure 8, decode at {rate} GB/s relative to 2000{said}", theirs[1],
                        (own[1] + extra) / (middle[1] + extra), "x", "" if extra else _DILUTED)  # fmt: skip


def buffers() -> Iterator[Claim]:
    """Figure 9: A100 with local buffers of 64 to 1024 KB, relative to 192."""
    base = chips.chip("a100-80g-sxm")

    def with_local(kib: int) -> Chip:
        core = base.core.model_copy(update={"sram_bytes": kib * 1024})
        return base.model_copy(update={"core": core, "name": f"a100-{kib}"})

    area, (first, each) = total_mm2(base), _layer(with_local(192))
    for kib, theirs in published.BUFFERS.items():
        chip = with_local(kib)
        own = (total_mm2(chip) / area, *(a / b for a, b in zip(_layer(chip), (first, each), strict=True)))
        for what, figure, ours in zip(("area", "prefill", "decode"), theirs, own, strict=True):
            why = "small buffers cost its mapper traffic; a library's tiles fit into 64 KB" if kib < 192 else ""
            yield Claim(_LLMCOMPASS, f"figure 9, {what} with {kib} KB per core relative to 192", figure, ours, "x",
                        why if what == "prefill" else "")  # fmt: skip


def layers() -> Iterator[Claim]:
    """One layer of GPT-3 on four A100, measured; and how long a prediction takes."""
    first, each = _layer(catalog.device("a100-80g-sxm"))
    for extra, said in ((0.0, ""), (published.OVERHEAD, ", with launches")):
        yield Claim(
            _LLMCOMPASS, f"GPT-3 layer on 4 A100, prefill of 8 x 2048{said}", 66.7e-3, first + extra, "s", "measured"
        )
        why = (
            ""
            if extra
            else "measured operator by operator, PyTorch's launches and all; here kernels follow one another"
        )
        yield Claim(
            _LLMCOMPASS, f"GPT-3 layer on 4 A100, decode at 3072{said}", 1.11e-3, each + extra, "s", why or "measured"
        )
    _generation(chips.chip("ga100"), 4, 96, 8, 2048, 1024)
    start = time.perf_counter()
    _generation(chips.chip("ga100"), 4, 96, 8, 2048, 1000)
    yield Claim(_LLMCOMPASS, "seconds to predict GPT-3 175B on 4 A100", 16 * 60.0, time.perf_counter() - start, "s",
                "closed forms, not a search of mappings")  # fmt: skip


def _cores(base: Chip, cores: int, lanes: int, side: int, width: int, kib: int) -> Chip:
    """A chip of figure 7, whose vector units and registers follow the width."""
    core = base.core.model_copy(update={
        "lanes": lanes, "sram_bytes": kib * 1024,
        "array": base.core.array.model_copy(update={"rows": side, "columns": side}),
        "vector": base.core.vector.model_copy(
            update={"width": width, "int32": width // 2, "fp32": width // 2, "fp64": width // 4}),
        "registers": base.core.registers.model_copy(
            update={"depth": 512 * min(width, 32), "files": max(1, width // 32)}),
    })  # fmt: skip
    return base.model_copy(update={"cores": cores, "core": core, "name": f"ga100-{cores}x{side}"})


def _generation(chip: Chip | Device, devices: int, depth: int, batch: int, prompt: int, output: int) -> float:
    """Seconds of a batch of GPT-3 of ``depth`` layers, tensor parallel, with plain attention."""
    return _run(chip, devices, depth, batch, prompt, output)["e2e_s"].value  # type: ignore[no-any-return]


def _run(chip: Chip | Device, devices: int, depth: int, batch: int, prompt: int, output: int) -> dict[str, Any]:
    from ridgeline import experiments

    update = {"num_layers": depth, "max_positions": 8192, "published_parameters": None}
    model = catalog.model("gpt3-175b").model_copy(update=update)
    device = chip_device(chip) if isinstance(chip, Chip) else chip
    workload = {"kind": "generate", "batch_size": batch, "prompt_len": prompt, "output_len": output, "dtype": "fp16"}
    plan = [f"tensor_parallel:degree={devices}"] if devices > 1 else []
    return predict(experiments.make(model, Cluster(device=device, devices_per_node=devices), workload, plan)).metrics


def _layer(chip: Chip | Device) -> tuple[float, float]:
    """Seconds of one layer of GPT-3 on four chips, batch 8: (prefill of 2048, decode at 3072)."""
    deep, shallow = (_run(chip, 4, depth, 8, 2048, 2) for depth in (9, 1))
    first = (deep["ttft_s"].value - shallow["ttft_s"].value) / 8
    deep, shallow = (_run(chip, 4, depth, 8, 3071, 2) for depth in (9, 1))
    return first, (deep["tpot_s"].value - shallow["tpot_s"].value) / 8


# ---- FPGA and accelerators of other dataflows -------------------------------------------------------------------


def dfx() -> Iterator[Claim]:
    """DFX, predicted as any device: fitted on GPT-2 345M, held out on 1.5B; and the GPUs that it is compared with."""
    for n, rate in published.DFX_345M:
        ours = sentence("gpt2-medium", catalog.device("dfx-u280"), n)
        yield Claim("DFX", f"GPT-2 345M on {n} FPGA", rate, ours, "tokens/s", "fitted on these")
    fpga = sentence("gpt2-1.5b", catalog.device("dfx-u280"), 4)
    gpu = sentence("gpt2-1.5b", catalog.device("v100-32g-sxm"), 1)
    yield Claim("DFX", "GPT-2 1.5B (24 heads) on 4 FPGA", published.DFX_XL, fpga, "tokens/s", "held out")
    yield Claim("DFX", "GPT-2 1.5B, speed-up over its GPU baseline as published", 5.58, fpga / published.GPU_XL, "x",
                "held out")  # fmt: skip
    better = (fpga / published.DFX_DOLLARS) / (published.GPU_XL / published.GPU_DOLLARS)
    yield Claim("DFX", "the same, tokens/s per dollar of the cards", 8.21, better, "x", "held out")
    theirs = 3.99 / 3.78 * 5.58
    joules = (fpga / published.DFX_WATTS) / (published.GPU_XL / published.GPU_WATTS)
    yield Claim("DFX", "the same, tokens per joule (3.99x with the mean speed-up of 3.78x)", theirs, joules, "x",
                "held out; both powers are measured, not predicted")  # fmt: skip
    yield Claim("DFX", "GPT-2 1.5B on the GPU baseline (theirs 4 V100, ours one)", published.GPU_XL, gpu, "tokens/s",
                "theirs is bound by launches: 75 ms per token; one V100 reads the weights in 3.5 ms")  # fmt: skip
    yield Claim("DFX", "speed-up over the GPU, both predicted", 5.58, fpga / gpu, "x",
                "four FPGAs are slower than a V100 that launches do not bind: the claim is about its host")  # fmt: skip


def sentence(model: str, device: Device, devices: int) -> float:
    """Tokens per second of one sequence of 64 tokens in and 64 out, tensor parallel."""
    from ridgeline import experiments

    workload = {"kind": "generate", "batch_size": 1, "prompt_len": 64, "output_len": 64, "dtype": "fp16"}
    plan = [f"tensor_parallel:degree={devices}"] if devices > 1 else []
    e = experiments.make(model, Cluster(device=device, devices_per_node=devices), workload, plan)
    return predict(e).metrics["tokens_per_s"].value


def flexflow() -> Iterator[Claim]:
    """FlexFlow, figure 15: utilization by unrolling, in percent; and the range of its speed-ups."""
    for name, nets in published.FLEXFLOW_UTILIZATION.items():
        for net, theirs in nets.items():
            why = "PV's layers are from memory" if net == "PV" and name == "FlexFlow" else "read off, within 2 points"
            yield Claim(
                "FlexFlow", f"figure 15, {name}, {net}", theirs, 100 * flexflow_utilization(name, net), "%", why
            )
    for name in ("systolic", "2D mapping", "tiling"):
        ratios = [
            flexflow_utilization("FlexFlow", net) / flexflow_utilization(name, net) for net in published.FLEXFLOW_LAYERS
        ]
        theirs_ratios = [
            a / b for a, b in zip(published.FLEXFLOW_GOPS["FlexFlow"], published.FLEXFLOW_GOPS[name], strict=True)
        ]
        why = "the paper says 2 to 10x"
        if name == "systolic":
            why = "theirs from figure 16, whose systolic rates are a third to two thirds of figure 15's; " + why
        for said, pick in (("least", min), ("most", max)):
            yield Claim("FlexFlow", f"{said} speed-up over {name}", pick(theirs_ratios), pick(ratios), "x",
                        why)  # fmt: skip


def flexflow_utilization(name: str, net: str) -> float:
    """Share of the multipliers of class ``flexflow`` that work on a network under one of figure 15's dataflows."""
    array = catalog.architecture("flexflow").gemm["bf16"].array
    found = published.FLEXFLOW_LAYERS[net]
    side = published.FLEXFLOW_SIDE.get(net, 6)
    if name == "FlexFlow":
        cycles = unrolled.flexible_cycles(found, unrolled.factors(found, array))
    elif name == "systolic":
        cycles = sum(unrolled.systolic_kernels(layer, array, side) for layer in found)
    else:
        count = {"2D mapping": unrolled.two_dimensional, "tiling": unrolled.tiling}[name]
        cycles = sum(count(layer, array) for layer in found)
    return unrolled.utilization(found, cycles, array)


def nlp_fast() -> Iterator[Claim]:
    """NLP-Fast: what splitting heads and columns can give at most, by the memory traffic that it saves."""
    why = ("ours: the most that partitioning alone gives where memory is the only limit; zero skipping and the FPGA's"
           " resources are not published")  # fmt: skip
    for platform, theirs in published.NLP_FAST.items():
        yield Claim(
            "NLP-Fast", f"BERT-large on {platform}, batch 8, 256 tokens", theirs, partitioning_limit(), "x", why
        )


def partitioning_limit(batch: int = 8, seq: int = 256, hidden: int = 1024, heads: int = 16, width: int = 4) -> float:
    """Bytes of a layer whose intermediates pass through memory over those of one that keeps them on chip.

    Plain: scores and the feed-forward's activations are each written and read twice. Split by head and by column chunk,
    both stay on chip; inputs and outputs of the six products and of what lies between still pass.
    """
    weights = 12 * hidden**2 * width
    rows = batch * seq * hidden * width
    passing = 12 * rows  # six products read and write, residuals and norms in between: the same in both
    scores, inner = 4 * batch * heads * seq**2 * width, 4 * 4 * rows
    return (weights + passing + scores + inner) / (weights + passing)


# ---- the table --------------------------------------------------------------------------------------------------


def claims_table(found: list[Claim]) -> Table:
    """All claims with their errors."""
    columns = [Column("Work", align="left"), Column("Figure", align="left"), Column("Published"), Column("Here"),
               Column("Error"), Column("Reason, or kind of figure", align="left")]  # fmt: skip
    rows = [[c.work, c.what, _say(c.theirs, c.unit), _say(c.ours, c.unit), percent(c.error, signed=True), c.why]
            for c in found]  # fmt: skip
    return Table("Published figures of hardware designs", columns, rows)


def _say(value: float, unit: str) -> str:
    if unit == "s":
        return seconds(value)
    return f"${value:,.0f}" if unit == "$" else f"{value:,.4g}{unit if unit in ('x', '%') else ' ' + unit}"
