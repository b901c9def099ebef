"""RISE: random masks, weighted by the score of what they leave visible."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from aha.classifier import FrozenClassifier
from aha.explainer import Explainer


class RISE(Explainer):
    """Randomised input sampling (Petsiuk et al., arXiv 1806.07421), as in its released code.

    S = Σ_k p(x⊙M_k)·M_k / (N·keep), with M_k a coarse random grid, upsampled bilinearly and cropped at a random shift;
    hidden pixels are the data mean. All images of a run share the masks, which depend on the seed alone.

    Args:
        classifier: any classifier.
        num_masks: N; one forward pass of the classifier each, per image.
        cells: side of the coarse grid.
        keep: probability that a cell stays visible, in (0, 1].
        seed: of the masks.
        chunk_size: images per classifier forward.
    """

    name = "rise"

    def __init__(
        self,
        classifier: FrozenClassifier,
        *,
        num_masks: int = 1000,
        cells: int = 7,
        keep: float = 0.5,
        seed: int = 0,
        chunk_size: int = 64,
    ) -> None:
        super().__init__(classifier)
        if num_masks < 1 or cells < 1 or chunk_size < 1 or not 0 < keep <= 1:
            got = f"{num_masks}, {cells}, {chunk_size}, {keep}"
            msg = f"RISE needs num_masks, cells and chunk_size of at least 1 and keep in (0, 1], got {got}."
            raise ValueError(msg)
        self.num_masks = num_masks
        self.cells = cells
        self.keep = keep
        self.seed = seed
        self.chunk_size = chunk_size

    @torch.no_grad()
    def _attribute(self, images: Tensor, targets: Tensor | None) -> Tensor:
        size = (images.shape[-2], images.shape[-1])
        if targets is None:
            targets = torch.cat([self.classifier(chunk).argmax(-1) for chunk in images.split(self.chunk_size)])
        grids, shifts = self._draw(size)
        mean = self.classifier.mean.to(images)
        maps = images.new_zeros(len(images), *size)
        per_chunk = max(1, self.chunk_size // len(images))
        for start in range(0, self.num_masks, per_chunk):
            masks = self._masks(grids[start : start + per_chunk].to(images), shifts[start : start + per_chunk], size)
            for first in range(0, len(images), self.chunk_size):
                part = slice(first, first + self.chunk_size)
                shown = torch.lerp(mean, images[part, None], masks[None, :, None]).flatten(0, 1)
                repeated = targets[part].repeat_interleave(len(masks))
                scores = self.classifier.target_probability(self.classifier(shown), repeated).view(-1, len(masks))
                maps[part] += torch.einsum("bk,khw->bhw", scores.to(masks), masks)
        return maps[:, None] / (self.num_masks * self.keep)

    def _draw(self, size: tuple[int, int]) -> tuple[Tensor, list[tuple[int, int]]]:
        """Coarse grids ``(num_masks, cells, cells)`` of zeros and ones, and crop shifts in pixels."""
        generator = torch.Generator().manual_seed(self.seed)
        grids = torch.rand(self.num_masks, self.cells, self.cells, generator=generator) < self.keep
        reach = torch.tensor([-(-side // self.cells) for side in size])
        shifts = (torch.rand(self.num_masks, 2, generator=generator) * reach).long()
        return grids, [tuple(shift) for shift in shifts.tolist()]

    def _masks(self, grids: Tensor, shifts: list[tuple[int, int]], size: tuple[int, int]) -> Tensor:
        """Masks ``(count, H, W)`` in [0, 1]."""
        fine = [(self.cells + 1) * -(-side // self.cells) for side in size]
        upsampled = F.interpolate(grids[:, None], size=fine, mode="bilinear", align_corners=False)[:, 0]
        return torch.stack(
            [mask[dy : dy + size[0], dx : dx + size[1]] for mask, (dy, dx) in zip(upsampled, shifts, strict=True)]
        )
