"""Class sensitivity: do explanations of two classes of one image differ?"""

from __future__ import annotations

from torch import Tensor

from aha.metrics._base import SampleMean
from aha.metrics._maps import map_states
from aha.metrics.similarity import rank_correlation


def class_sensitivity(maps: Tensor, other_maps: Tensor) -> Tensor:
    """Rank correlation between the maps of two classes of the same images; low = the explainer tells them apart.

    Args:
        maps: of one class, ``(batch, 1, H, W)``.
        other_maps: of another class, same shape.

    Returns:
        ``(batch,)`` float64 in [−1, 1]; NaN excluded (a map that is constant or not finite).

    Example:
        >>> import torch
        >>> left = torch.tensor([[[[3.0, 2.0, 1.0, 0.0]]]])
        >>> class_sensitivity(left, left.flip(-1)), class_sensitivity(left, left)
        (tensor([-1.], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    return rank_correlation(maps, other_maps)


class ClassSensitivity(SampleMean):
    """Mean rank correlation between maps of two classes; lower is better. See :func:`class_sensitivity`.

    A sample with a constant map is both counted as such and excluded: it has no ranking to correlate.
    """

    higher_is_better = False
    plot_lower_bound = -1.0
    plot_upper_bound = 1.0

    def update(self, maps: Tensor, other_maps: Tensor) -> None:
        """Add the maps of two classes of the same images, ``(batch, 1, H, W)`` both."""
        self._add(class_sensitivity(maps, other_maps), map_states(maps)[1] | map_states(other_maps)[1])
