"""Augmentation on the device, for training only; the paper uses none."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Literal

import kornia.augmentation as K
import torch

from aha.data.pipeline import stream_seed

Augmentation = Literal["flip", "random_resized_crop", "color_jitter"]


def augment_batch(batch: dict[str, Any], augmentations: Sequence[Augmentation], *, seed: int = 0) -> dict[str, Any]:
    """Flip, crop and recolour the images of a batch, and flip and crop its masks along with them.

    The draw depends on ``seed`` and the batch's keys alone: a resumed run repeats it, ranks differ, and torch's own
    random state stays untouched.

    Args:
        batch: with ``image`` (B,3,H,W) uint8 or float in [0,1], ``key``, and perhaps ``mask`` (B,1,H,W) bool.
        augmentations: ``"flip"`` (left-right, half of the time), ``"random_resized_crop"`` (area 0.35 to 1),
            ``"color_jitter"`` (brightness, contrast and saturation by up to 0.4, hue by up to 0.1 of a turn).
        seed: of the run and epoch.

    Returns:
        A new batch whose images are float in [0,1].
    """
    image = batch["image"]
    image = image.float() / 255.0 if image.dtype == torch.uint8 else image
    size = tuple(image.shape[-2:])
    made = {
        "random_resized_crop": lambda: K.RandomResizedCrop(size, scale=(0.35, 1.0), resample="bilinear"),
        "flip": lambda: K.RandomHorizontalFlip(p=0.5),
        "color_jitter": lambda: K.ColorJitter(0.4, 0.4, 0.4, 0.1),
    }
    names = ["image", "mask"] if "mask" in batch else ["image"]
    steps = K.AugmentationSequential(*(made[name]() for name in made if name in augmentations), data_keys=names)
    state = torch.get_rng_state()
    try:
        torch.default_generator.manual_seed(stream_seed(seed, zlib.crc32("\n".join(batch["key"]).encode())) % 2**63)
        out = steps(*([image, batch["mask"].float()] if "mask" in batch else [image]))
    finally:
        torch.set_rng_state(state)
    image, *mask = out if isinstance(out, (list, tuple)) else (out,)
    return {**batch, "image": image.clamp(0, 1), **({"mask": mask[0] > 0.5} if mask else {})}
