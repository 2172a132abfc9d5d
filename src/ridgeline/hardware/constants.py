"""Efficiency constants of a design: those fitted on a chip of its architecture, scaled by what the two differ in.

Fitted constants are figures of one core. A core that is fed more bytes per clock, has wider vector units or larger
arrays than the one they were fitted on has others; shares and latencies stay. This is an assumption: as good a library
for the design as there is for its relative. Predictions are marked as class defaults, with their wider intervals.
"""

from __future__ import annotations

from ridgeline import catalog
from ridgeline.catalog import chips
from ridgeline.spec.chip import Chip
from ridgeline.spec.efficiency import Efficiency


def scaled_constants(c: Chip) -> Efficiency | None:
    """The constants of ``c``; None, for the class's own, where that was fitted on no chip of the catalog."""
    if c.architecture not in catalog.architectures():
        return None
    known = catalog.architecture(c.architecture)
    if any(g.engine == "unrolled" for g in known.gemm.values()):
        own = {"array": (c.core.array.rows, c.core.array.columns)}
        return known.model_copy(update={"gemm": {d: g.model_copy(update=own) for d, g in known.gemm.items()}})
    reference = next((chips.chip(name) for name in known.fitted_on if name in chips.chips()), None)
    if reference is None or reference == c:
        return None
    fed = _fed(c) / _fed(reference)
    vector = _vector(c) / _vector(reference)
    # Kernels get far less from a cache than it gives (the A100's: 3.1 of 7.2 TB/s): theirs is the limit, until its is.
    near = min(known.l2_gain * reference.memory.bandwidth, c.cache_bytes_per_clock * c.clock)
    tiles = _tiles(c, reference)
    gemm = {
        dtype: g.model_copy(
            update={
                "load_bytes_per_clock": g.load_bytes_per_clock * fed,
                "port": g.port * fed,
                "vector_clocks": g.vector_clocks / vector,
                "power": g.power if c.watts else 0.0,  # without a rating, a design draws what its peaks need
                **tiles,
            }
        )
        for dtype, g in known.gemm.items()
    }
    prefill = {
        name: p.model_copy(update={"softmax_clocks": p.softmax_clocks / vector}) for name, p in known.prefill.items()
    }
    decode = {
        name: d.model_copy(update={"draw_bytes_per_clock": d.draw_bytes_per_clock * fed})
        for name, d in known.decode.items()
    }
    update = {"gemm": gemm, "prefill": prefill, "decode": decode, "l2_gain": near / c.memory.bandwidth}
    return known.model_copy(update=update)


def _fed(c: Chip) -> float:
    return c.cache_bytes_per_clock / c.cores


def _vector(c: Chip) -> float:
    return float(c.core.lanes * c.core.vector.width)


def _tiles(c: Chip, reference: Chip) -> dict[str, float]:
    """Factors on the sides of output tiles: those of the arrays, as far as the local buffer holds them."""
    rows = c.core.array.rows / reference.core.array.rows
    columns = c.core.array.columns / reference.core.array.columns
    room = c.core.sram_bytes / reference.core.sram_bytes
    fits = min(1.0, (room / (rows * columns)) ** 0.5) if rows * columns > 1 else 1.0
    return {"tile_rows": rows * fits, "tile_columns": columns * fits}
