"""Yardsticks: random, centre prior, object mask, input gradient."""

from __future__ import annotations

import zlib

import torch
from kornia.filters import gaussian_blur2d
from torch import Tensor

from aha.baselines.geometry import resize
from aha.baselines.traceless import differentiable
from aha.classifier import FrozenClassifier
from aha.explainer import Explainer, Targets, some_images


class Random(Explainer):
    """Random patches: what an explanation must at least beat. The same image always gets the same map.

    Args:
        classifier: any classifier.
        grid: patches per side; None = every pixel by itself, which hides images far faster than patches do.
        seed: together with the image's content it determines the map.
    """

    name = "random"

    def __init__(self, classifier: FrozenClassifier, *, grid: int | None = 7, seed: int = 0) -> None:
        super().__init__(classifier)
        self.grid = grid
        self.seed = seed

    def _attribute(self, images: Tensor, targets: Tensor | None) -> Tensor:  # noqa: ARG002
        size = (images.shape[-2], images.shape[-1])
        shape = size if self.grid is None else (self.grid, self.grid)
        maps = []
        for image in images.detach().float().cpu():
            generator = torch.Generator().manual_seed(zlib.crc32(image.contiguous().numpy().tobytes()) + self.seed)
            maps.append(torch.rand(1, *shape, generator=generator))
        return resize(torch.stack(maps), size, "nearest").to(images.device)


class CentrePrior(Explainer):
    """The nearer to the centre, the more important: what a data set's framing alone is worth."""

    name = "centre_prior"

    def _attribute(self, images: Tensor, targets: Tensor | None) -> Tensor:  # noqa: ARG002
        height, width = images.shape[-2:]
        y = torch.linspace(-1, 1, height, device=images.device)[:, None]
        x = torch.linspace(-1, 1, width, device=images.device)[None]
        return -(x.square() + y.square()).expand(len(images), 1, height, width)


class ObjectMask(Explainer):
    """The annotated object itself: what perfect localisation is worth in faithfulness.

    Needs the batch's masks: ``attribute(images, targets, masks=batch["mask"])``; ``uses_masks`` says so.
    """

    name = "object_mask"
    uses_masks = True

    def attribute(self, images: Tensor, targets: Targets = None, *, masks: Tensor | None = None) -> Tensor:
        """Masks ``(batch, 1, H, W)``, bool or 0…1, as maps; see :meth:`Explainer.attribute`.

        Raises:
            ValueError: without masks of the images' size.
        """
        images = some_images(images, self.device)
        expected = (len(images), 1, *images.shape[-2:])
        if masks is None or tuple(masks.shape) != expected:
            got = None if masks is None else tuple(masks.shape)
            msg = f"object_mask needs masks=… of shape {expected}, got {got}: use a data set with masks."
            raise ValueError(msg)
        return masks.to(images.device).float()


class InputGradient(Explainer):
    """Gradient of the class logit with respect to the pixels.

    Args:
        classifier: any differentiable classifier.
        times_input: signed gradient · normalised pixel, summed over channels (arXiv 1605.01713); otherwise the
            gradient's magnitude (arXiv 1312.6034).
        blur: σ of a Gaussian that smooths the map, as a share of the image's shorter side; 0 = none.
    """

    name = "input_gradient"

    def __init__(self, classifier: FrozenClassifier, *, times_input: bool = False, blur: float = 1 / 32) -> None:
        super().__init__(classifier)
        if blur < 0:
            msg = f"blur must be ≥ 0, got {blur}."
            raise ValueError(msg)
        self.times_input = times_input
        self.blur = blur

    def _attribute(self, images: Tensor, targets: Tensor | None) -> Tensor:
        with differentiable(self.classifier, images) as (classifier, pixels):
            pixels.requires_grad_()
            logits = classifier.forward(pixels)
            score = logits.gather(1, classifier.resolve_targets(targets, logits)[:, None]).sum()
            (gradient,) = torch.autograd.grad(score, pixels)
            pixels = pixels.detach()
        if self.times_input:
            maps = (gradient * (pixels - classifier.mean)).sum(1, keepdim=True)
        else:
            maps = gradient.abs().sum(1, keepdim=True)
        side = min(maps.shape[-2:])
        sigma = self.blur * side
        taps = min(2 * round(3 * sigma) + 1, side - 1 + side % 2)
        return maps if taps < 3 else gaussian_blur2d(maps, (taps, taps), (sigma, sigma), border_type="reflect")
