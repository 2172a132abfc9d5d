"""Dynamic loss scaling for half-precision gradients (arXiv:1710.03740, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

SMALLEST, LARGEST = 1.0, 2.0**24


@dataclass
class DynamicScale:
    """Halves the scale when gradients overflow, doubles it after ``interval`` consecutive steps without overflow."""

    scale: float = 2.0**16
    interval: int = 2000
    good: int = 0
    """Finite steps since the scale last changed."""

    def update(self, finite: bool) -> None:
        """Update the scale after a step; ``finite``: whether its gradients were."""
        if not finite:
            self.scale, self.good = max(SMALLEST, self.scale / 2), 0
            return
        self.good += 1
        if self.good >= self.interval:
            self.scale, self.good = min(LARGEST, self.scale * 2), 0

    def state_dict(self) -> dict[str, float]:
        """For checkpoints."""
        return {"scale": self.scale, "good": float(self.good)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore from a checkpoint."""
        self.scale, self.good = float(state["scale"]), int(state["good"])
