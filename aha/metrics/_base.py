"""The accumulator that most metrics share: an exact mean over samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class SampleMean(Metric):
    """Mean of one value per sample, reduced as exact sums over any number of processes.

    States, besides the float64 sum: ``count`` (samples in the mean), ``excluded`` (NaN: the value is undefined for
    that sample) and ``constant`` (maps that rank nothing; in the mean or not, as the metric says).
    """

    is_differentiable = False
    full_state_update = False

    total: Tensor
    count: Tensor
    excluded: Tensor
    constant: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        for state in ("count", "excluded", "constant"):
            self.add_state(state, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def _add(self, values: Tensor, constant: Tensor | None = None) -> Tensor:
        """Add values ``(batch,)``, NaN = excluded; returns which were counted."""
        valid = ~values.isnan()
        self.total += values[valid].double().sum().to(self.total.device)
        self.count += int(valid.sum())
        self.excluded += int((~valid).sum())
        if constant is not None:
            self.constant += int(constant.sum())
        return valid

    def compute(self) -> Tensor:
        """The mean, float64; NaN if every sample was excluded."""
        return self.total / self.count

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Draw one value, or several as a series; default: the value so far. Returns figure and axes."""
        return self._plot(val, ax)
