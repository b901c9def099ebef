"""Tiny classifiers of many families, untrained but not degenerate: weights are spread so that maps differ."""

from __future__ import annotations

import torch

from aha.classifier import FrozenClassifier

SMALL = {"depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 10}
MODELS = {
    "cls": ("test_vit", {"num_classes": 10, "img_size": 64}),
    "average": ("test_vit2", {"num_classes": 10, "img_size": 64}),
    "attention_pool": ("test_vit3", {"num_classes": 10, "img_size": 64}),
    "scaled": ("test_vit4", {"num_classes": 10, "img_size": 64}),
    "distilled": ("deit_tiny_distilled_patch16_224", {**SMALL, "img_size": 64}),
    "deit3": ("deit3_small_patch16_224", {**SMALL, "img_size": 64}),
    "registers": ("vit_small_patch14_reg4_dinov2", {**SMALL, "img_size": 56}),
    "no_prefix": ("vit_base_patch16_rope_reg1_gap_256", {**SMALL, "img_size": 64}),
    "eva02": ("eva02_tiny_patch14_224", {**SMALL, "img_size": 56}),
    "dinov3": ("vit_small_patch16_dinov3", {**SMALL, "img_size": 64}),
    "beit": ("beit_base_patch16_224", {**SMALL, "img_size": 64}),
    "siglip": ("vit_base_patch16_siglip_224", {**SMALL, "img_size": 64}),
    "pvt": ("pvt_v2_b0", {"embed_dims": (16, 16, 32, 32), "num_heads": (1, 1, 2, 2), "num_classes": 10}),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"depths": (2, 2), "embed_dim": 16, "num_heads": (1, 2), "num_classes": 10, "img_size": 64},
    ),
    "convnext": ("test_convnext", {"num_classes": 10}),
}
TRANSFORMERS = [key for key in MODELS if key != "convnext"]


def build(key: str, *, double: bool = False, **overrides) -> FrozenClassifier:  # noqa: ANN003
    """A classifier of the family, always with the same weights; LayerScale and zero-initialised heads are spread."""
    name, kwargs = MODELS[key]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        size = overrides.pop("image_size", 64 if key == "pvt" else None)
        classifier = FrozenClassifier.from_timm(name, pretrained=False, image_size=size, **kwargs | overrides)
        with torch.no_grad():
            for parameter in classifier.model.parameters():
                is_vector = parameter.ndim == 1
                scale = 0.3 if is_vector else 1.5 / parameter[0].numel() ** 0.5
                centre = 1.0 if is_vector and parameter.mean() > 0.5 else 0.0
                parameter.copy_(torch.randn_like(parameter) * scale + centre)
    return classifier.double() if double else classifier


def pictures(classifier: FrozenClassifier, count: int = 2, *, double: bool = False, seed: int = 0) -> torch.Tensor:
    """Random images in [0, 1] of the classifier's size."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 3, *classifier.image_size, generator=generator)
    return images.double() if double else images
