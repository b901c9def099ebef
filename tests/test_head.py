"""The head: geometry over families, conditioning on the class, size."""

from __future__ import annotations

import pytest
import torch

import aha
from aha.head import AttributionHead, follow_edges, standardize

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


def slow_guided_filter(guide: list, maps: list, reach: int, variance: float) -> torch.Tensor:
    """He et al. 2013, eqs. 5, 6 and 8 as written: a line a·I + b per window, averaged over the windows of a pixel."""
    height, width = len(guide), len(guide[0])

    def window(y: int, x: int) -> list[tuple[int, int]]:
        def mirrored(i: int, n: int) -> int:
            return -i if i < 0 else 2 * n - 2 - i if i >= n else i

        reached = range(-reach, reach + 1)
        return [(mirrored(y + j, height), mirrored(x + i, width)) for j in reached for i in reached]

    lines = {}
    for y in range(height):
        for x in range(width):
            inside = window(y, x)
            i_mean = sum(guide[j][i] for j, i in inside) / len(inside)
            p_mean = sum(maps[j][i] for j, i in inside) / len(inside)
            i_square = sum(guide[j][i] ** 2 for j, i in inside) / len(inside)
            both = sum(guide[j][i] * maps[j][i] for j, i in inside) / len(inside)
            a = (both - i_mean * p_mean) / (i_square - i_mean**2 + variance)
            lines[y, x] = a, p_mean - a * i_mean
    out = torch.zeros(height, width, dtype=torch.float64)
    for y in range(height):
        for x in range(width):
            inside = window(y, x)
            a, b = (sum(lines[place][k] for place in inside) / len(inside) for k in (0, 1))
            out[y, x] = a * guide[y][x] + b
    return out


def test_follow_edges_equals_the_guided_filter_as_written() -> None:
    torch.manual_seed(0)
    images, maps = torch.rand(2, 3, 16, 20, dtype=torch.float64), torch.randn(2, 1, 16, 20, dtype=torch.float64)
    grey = images[:, 0] * 0.299 + images[:, 1] * 0.587 + images[:, 2] * 0.114
    for b, found in enumerate(follow_edges(maps, images)):
        expected = slow_guided_filter(grey[b].tolist(), maps[b, 0].tolist(), reach=3, variance=3e-3)
        torch.testing.assert_close(found[0], expected, atol=1e-6, rtol=1e-6)


def test_follow_edges_fills_the_object_and_stops_at_its_edge() -> None:
    images, maps = torch.zeros(1, 3, 64, 64), torch.zeros(1, 1, 64, 64)
    images[..., 20:44, 20:44] = 1.0  # a white square,
    maps[..., 20:36, 12:28] = 1.0  # and a token that lies half on it
    found = follow_edges(maps, images)[0, 0]
    assert found[28, 19] < 0.5 * found[28, 20]  # the edge divides the token,
    assert found[28, 36] > 0.1 > 0.01 > found[28, 44]  # the square shares its part of it as far as its own edge,
    y, x = divmod(int(found.argmax()), 64)
    assert 20 <= y < 44 and 20 <= x < 44  # and holds the maximum
    scaled = follow_edges(3 * maps + 1, images)[0, 0]
    torch.testing.assert_close(scaled, 3 * found + 1, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [(64, 96), (224, 160)])
def test_edges_are_an_option_of_the_head(size: tuple[int, int]) -> None:
    classifier = aha.FrozenClassifier.from_timm("test_vit", pretrained=False, image_size=size)
    explainer = aha.AmortizedExplainer(classifier, width=16, edges=True)
    images = torch.rand(2, 3, *size)
    maps = explainer.attribute(images, 3)
    assert maps.shape == (2, 1, *size) and maps.isfinite().all()
    explainer.head.edges = False
    torch.testing.assert_close(maps, follow_edges(explainer.attribute(images, 3), images))


def test_without_class_vectors_only_the_evidence_tells_classes_apart() -> None:
    torch.manual_seed(0)
    classifier = aha.FrozenClassifier.from_timm("test_efficientnet", pretrained=False, image_size=64)
    explainer = aha.AmortizedExplainer(classifier, width=16, class_vector="none")
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        explainer.head.output.weight.normal_()
        output, classes = explainer.encode(images), [torch.full((2,), k) for k in (1, 2)]
        maps = [explainer.decode(output, images, k) for k in classes]
        evidence = classifier.evidence(output.final, classes[0])
        same = explainer.head(output.features, classes[1], images, evidence=evidence)
    torch.testing.assert_close(same, maps[0])  # another class, but the evidence of the first
    assert (maps[0] - maps[1]).abs().max() > 1e-3
    with pytest.raises(ValueError, match="needs evidence=True"):
        aha.AmortizedExplainer(classifier, class_vector="none", evidence=False)


@pytest.mark.parametrize(("feature_norm", "sees_strength"), [("position", False), ("image", True)])
def test_feature_norm_decides_whether_strong_positions_show(feature_norm: str, sees_strength: bool) -> None:
    torch.manual_seed(0)
    head = AttributionHead([8, 8], [4, 4], class_dim=0, width=16, feature_norm=feature_norm)
    feature, images = torch.randn(1, 8, 16, 16), torch.full((1, 3, 64, 64), 0.5)
    stronger = feature.clone()
    stronger[..., 4:8, 4:8] *= 3
    with torch.no_grad():
        weak, strong = (head([f, f], torch.zeros(1), images) for f in (feature, stronger))
    changed = (strong - weak).abs().max() / weak.std()
    assert (changed > 0.1) == sees_strength
    with pytest.raises(ValueError, match="feature_norm"):
        AttributionHead([8], [4], class_dim=0, feature_norm="batch")
