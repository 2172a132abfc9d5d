"""PowerInfer's placement as an integer linear program (arXiv:2312.12456, section 6): which neurons of each layer are on
the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

GROUPS = 64
"""Number of groups per layer: neurons of similar frequency are placed together, so that the program stays small."""
_GAP = 1e-4


def place_neurons(
    frequencies: Sequence[np.ndarray], neuron_bytes: Sequence[float], budget: float, least: int = 0
) -> list[int]:
    """Number of the most frequent neurons of each layer that are on the device.

    ``frequencies``: per layer, how often each neuron is active, [neurons] in 0 to 1. ``neuron_bytes``: of one neuron of
    each layer. Maximizes the summed frequency within ``budget`` bytes; a layer has none on the device, or at least
    ``least`` (or all), as fewer would not pay for the exchange between device and host.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import lil_matrix

    groups: list[tuple[int, int, float]] = []  # (layer, neurons, summed frequency)
    for layer, f in enumerate(frequencies):
        for part in np.array_split(np.sort(f)[::-1], min(GROUPS, len(f))):
            groups.append((layer, len(part), float(part.sum())))
    layers, count = len(frequencies), len(groups)
    # Variables: whether each group is on the device, then whether each layer uses the device at all.
    a = lil_matrix((1 + count + layers, count + layers))
    upper, lower = np.zeros(1 + count + layers), np.full(1 + count + layers, -np.inf)
    upper[0] = budget
    for i, (layer, neurons, _) in enumerate(groups):
        a[0, i] = neurons * neuron_bytes[layer]
        a[1 + i, i], a[1 + i, count + layer] = 1, -1  # only in a layer that uses the device
        a[1 + count + layer, i] = neurons
    for layer, f in enumerate(frequencies):
        a[1 + count + layer, count + layer] = -min(least, len(f))
        lower[1 + count + layer], upper[1 + count + layer] = 0, np.inf
    # A tiny reward per neuron fills the budget with neurons that the profile never saw.
    gains = [total + 1e-6 * neurons for _, neurons, total in groups]
    found = milp(
        -np.array([*gains, *[0.0] * layers]), constraints=LinearConstraint(a.tocsr(), lower, upper),
        integrality=np.ones(count + layers), bounds=Bounds(0, 1), options={"mip_rel_gap": _GAP},
    )  # fmt: skip
    hot = [0] * layers
    for (layer, neurons, _), chosen in zip(groups, found.x[:count], strict=True):
        hot[layer] += neurons * round(chosen)
    return hot
