"""Exact means of per-sample figures over any number of processes."""

from __future__ import annotations

import torch
from torch import Tensor


class Tally:
    """Sums and counts by name, in float64; values that are not finite are left out.

    Example:
        >>> tally = Tally()
        >>> tally.add("insertion", torch.tensor([0.25, 0.75, float("nan")]))
        >>> tally.means()
        {'insertion': 0.5}
    """

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, int]] = {}

    def add(self, name: str, values: Tensor) -> None:
        """Add per-sample values ``(batch,)``."""
        finite = values.detach().double()[values.isfinite()]
        total, count = self.sums.get(name, (0.0, 0))
        self.sums[name] = (total + float(finite.sum()), count + finite.numel())

    def means(self) -> dict[str, float]:
        """Means over all processes, by name; a process that saw nothing may lack names."""
        parts = [self.sums]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            parts = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(parts, self.sums)
        names = list(dict.fromkeys(name for part in parts for name in part))
        pairs = {name: [part[name] for part in parts if name in part] for name in names}
        return {
            name: sum(total for total, _ in pair) / count
            for name, pair in pairs.items()
            if (count := sum(count for _, count in pair))
        }
