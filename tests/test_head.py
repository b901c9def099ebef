"""The head: geometry over families, conditioning on the class, size."""

from __future__ import annotations

import pytest
import torch

import aha
from aha.head import AttributionHead, standardize

FAMILIES = [
    ("test_vit", {}, (96, 64)),
    ("test_vit", {"reg_tokens": 2}, (64, 64)),
    ("test_convnext", {}, (96, 64)),
    ("test_efficientnet", {}, (64, 96)),
    ("test_resnet", {}, (64, 64)),
    ("swin_tiny_patch4_window7_224", {"embed_dim": 24, "depths": (1, 1, 2, 1), "num_heads": (1, 2, 4, 8)}, (112, 224)),
]


@pytest.mark.parametrize(("name", "kwargs", "size"), FAMILIES)
def test_map_has_the_images_size_and_batch_equals_one_by_one(name: str, kwargs: dict, size: tuple[int, int]) -> None:
    classifier = aha.FrozenClassifier.from_timm(name, pretrained=False, image_size=size, num_classes=7, **kwargs)
    explainer = aha.AmortizedExplainer(classifier, width=16)
    images = torch.rand(3, 3, *size)
    maps = explainer.attribute(images, torch.tensor([0, 3, 6]))
    assert maps.shape == (3, 1, *size)
    assert maps.isfinite().all()
    single = torch.cat([explainer.attribute(images[i : i + 1], t) for i, t in enumerate((0, 3, 6))])
    torch.testing.assert_close(maps, single, atol=1e-4, rtol=1e-4)


def test_starts_at_the_evidence_map() -> None:
    classifier = aha.FrozenClassifier.from_timm("test_vit", pretrained=False, image_size=64)
    explainer = aha.AmortizedExplainer(classifier)
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        output = explainer.encode(images)
        targets = output.logits.argmax(-1)
        evidence = standardize(classifier.evidence(output.final, targets))
        evidence = torch.nn.functional.interpolate(evidence, size=(64, 64), mode="nearest")
    difference = explainer.attribute(images) - evidence
    assert difference.std() < 0.2 * evidence.std()
    assert difference.abs().max() > 0


@pytest.mark.parametrize("class_vector", ["weights", "embedding"])
def test_maps_depend_on_the_class(class_vector: str) -> None:
    torch.manual_seed(0)
    classifier = aha.FrozenClassifier.from_timm("test_vit", pretrained=False, image_size=64)
    explainer = aha.AmortizedExplainer(classifier, width=16, class_vector=class_vector, evidence=False)
    images = torch.rand(2, 3, 64, 64)
    first, second = explainer.attribute(images, 1), explainer.attribute(images, 2)
    assert (first - second).abs().max() > 1e-4 * first.abs().max()


def test_another_backbone_can_be_the_encoder() -> None:
    from aha.backbone import FrozenBackbone

    torch.manual_seed(0)
    classifier = aha.FrozenClassifier.from_timm("test_convnext", pretrained=False, image_size=(96, 64))
    encoder = FrozenBackbone.from_timm("test_vit", pretrained=False, image_size=(64, 64), num_classes=0)
    explainer = aha.AmortizedExplainer(classifier, encoder=encoder, width=16)
    images = torch.rand(2, 3, 96, 64)
    maps, logits, _ = explainer.explain(images)
    assert maps.shape == (2, 1, 96, 64)
    torch.testing.assert_close(logits, classifier(images))
    own = aha.AmortizedExplainer(classifier, width=16)
    assert [p.shape for p in own.head.parameters()] != [p.shape for p in explainer.head.parameters()]


def test_vit_base_head_is_at_most_eight_million_parameters() -> None:
    with torch.device("meta"):
        head = AttributionHead([768] * 4, [16] * 4, class_dim=768)
    assert sum(p.numel() for p in head.parameters()) <= 8_000_000


def test_all_parameters_receive_gradients() -> None:
    classifier = aha.FrozenClassifier.from_timm("test_convnext", pretrained=False, image_size=64)
    explainer = aha.AmortizedExplainer(classifier, width=16)
    images = torch.rand(2, 3, 64, 64)
    output = explainer.encode(images)
    torch.nn.init.normal_(explainer.head.output.weight)
    explainer.decode(output, images, output.logits.argmax(-1)).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in explainer.head.parameters())
    assert all(p.grad is None for p in classifier.parameters())


def test_bad_width_and_class_vector_are_named() -> None:
    classifier = aha.FrozenClassifier.from_timm("test_vit", pretrained=False, image_size=64)
    with pytest.raises(ValueError, match="width must be a multiple of 4, at least 8, got 10"):
        aha.AmortizedExplainer(classifier, width=10)
    with pytest.raises(ValueError, match="class_vector must be"):
        aha.AmortizedExplainer(classifier, class_vector="word")
