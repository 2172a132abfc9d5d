"""Which technique a model needs that does not fit: the best predicted plan by model and device memory, as one picture.

    python benchmarks/beyond_memory_picture.py docs/beyond-memory.svg

Every cell is a search (`ridgeline plan --task generate`) over all techniques that decide where weights rest, for
prompts of 512 tokens and answers of 128, on a device with the rates of an RTX 4090 and the memory of the column, with
128 GiB of host memory and a disk of 5 GB/s. "disk": at least a tenth of the weights is there.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

from ridgeline import catalog
from ridgeline.report.charts.svg import STYLE
from ridgeline.report.units import metric
from ridgeline.search import Question, search
from ridgeline.spec.device import Cluster, Host, Link
from ridgeline.spec.plan import Plan
from ridgeline.spec.workload import Generate
from ridgeline.techniques.registry import registry

MODELS = ("llama2-7b", "llama2-13b", "llama-33b", "mixtral-8x7b", "llama2-70b", "opt-175b")
MEMORY = (6, 8, 12, 16, 24, 48, 80)
"""GiB."""
PANELS = ((1, ()), (1, ("rtn:bits=4",)), (64, ()), (64, ("rtn:bits=4",)))
DEVICE = catalog.device("rtx4090").model_copy(update={
    "host": Host(name="desktop", cores=16, memory_bytes=128 * 2.0**30, memory_bandwidth=80e9),
    "disk": Link(name="nvme", bandwidth=5e9, latency=1e-4),
})  # fmt: skip
PLACING = tuple(n for n, cls in registry().items() if "resting_weights" in cls.card.owns and cls.card.runs)
NONE, NOTHING = "fits", "does not fit"
COLORS = {
    NONE: "#3d8a5f", "zero_inference": "#2f6fb0", "zero_inference, disk": "#7aa6d6", "flexgen": "#b8622b",
    "flexgen, disk": "#dba27c", "moe_offload": "#8a5aa8", "moe_offload, disk": "#bb9bd0",
    NOTHING: "#9aa3ad",
}  # fmt: skip
CELL, ROW, LEFT, TOP, GAP = 92, 34, 110, 80, 76


def best(model: str, gib: float, batch: int, fixed: tuple[str, ...]) -> tuple[str, float | None]:
    """What places the weights in the best plan, and its predicted tokens/s."""
    device = DEVICE.model_copy(update={"memory_bytes": gib * 2.0**30})
    work = Generate(batch_size=batch, prompt_len=512, output_len=128)
    only = frozenset({"flash_attention", *(c.partition(":")[0] for c in fixed), *PLACING})
    question = Question(catalog.model(model), Cluster(device=device), work, fixed=Plan.parse(list(fixed)), only=only)
    plans = search(question, workers=1).best
    if not plans:
        return NOTHING, None
    calls = [c for c in plans[0].experiment.plan.calls if c.name in PLACING]
    options = calls[0].options if calls else {}
    held = sum(int(options.get(f"weights_{tier}", 0)) for tier in ("device", "host"))
    disk = options.get("parameters") == "nvme" or ("weights_host" in options and held <= 90)
    what = calls[0].name + (", disk" if disk else "") if calls else NONE
    return what, plans[0].metrics["tokens_per_s"]


def text(x: float, y: float, words: str, style: str) -> str:
    """A line of text."""
    return f'<text x="{x}" y="{y}" class="{style}">{escape(words)}</text>'


def picture() -> str:
    """The SVG."""
    height = ROW * len(MODELS) + GAP
    width = LEFT + CELL * len(MEMORY) + 16
    total = TOP + height * len(PANELS)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" width="{width}" height="{total}" '
        'role="img"><title>The best predicted placement by model and device memory</title>'
        f"<style>{STYLE} .cell {{ fill: #ffffff; font-size: 12px; text-anchor: middle; }}</style>",
        f'<rect class="page" width="{width}" height="{total}" rx="8"/>',
        text(16, 28, "The best predicted placement by model and device memory, tokens/s", "ink title"),
    ]
    for i, (name, color) in enumerate(COLORS.items()):
        x, y = 16 + 150 * (i % 5), 40 + 18 * (i // 5)
        lines += [f'<rect x="{x}" y="{y}" width="12" height="12" fill="{color}"/>', text(x + 17, y + 11, name, "soft")]
    for k, (batch, fixed) in enumerate(PANELS):
        top = TOP + k * height + 56
        bits = "4-bit weights" if fixed else "16-bit weights"
        lines.append(text(16, top - 36, f"{batch} sequence{'s' * (batch > 1)}, {bits}", "ink head"))
        lines += [text(LEFT + CELL * (j + 0.5), top - 14, f"{gib} GiB", "soft middle") for j, gib in enumerate(MEMORY)]
        for i, model in enumerate(MODELS):
            lines.append(text(16, top + ROW * i + 21, model, "ink"))
            for j, gib in enumerate(MEMORY):
                what, rate = best(model, gib, batch, fixed)
                print(batch, fixed, model, gib, what, rate, file=sys.stderr)
                x, y = LEFT + CELL * j, top + ROW * i
                lines.append(f'<rect x="{x + 1}" y="{y + 1}" width="{CELL - 2}" height="{ROW - 2}" rx="3" '
                             f'fill="{COLORS[what]}"/>')  # fmt: skip
                lines.append(text(x + CELL / 2, y + 21, "–" if rate is None else metric(rate, ""), "cell"))
    return "\n".join([*lines, "</svg>\n"])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture(), encoding="utf-8")
