"""CDAM against versions written the long way: the whole model's backward pass, loops over runs."""

from __future__ import annotations

import pytest
import torch
from timm.models.vision_transformer import ResPostBlock
from tiny_models import TRANSFORMERS, build, pictures
from torch.utils.flop_counter import FlopCounterMode

from aha.baselines import CDAM
from aha.classifier import FrozenClassifier


def slow_cdam(classifier, images, target, *, hidden_change=None, score=None):  # noqa: ANN001, ANN201
    """S with every parameter and the image in the graph; the last block's input replaced if asked. One image."""
    model = classifier.model
    block = [m for m in model.modules() if hasattr(m, "norm1") and hasattr(m, "attn")][-1]
    kept = {}
    handles = [block.norm1.register_forward_hook(lambda _m, _a, out: kept.__setitem__("T", out))]
    if hidden_change is not None:
        handles.append(block.register_forward_pre_hook(lambda _m, args: (hidden_change(args[0]), *args[1:])))
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    maps = []
    for image, label in zip(images, target, strict=True):
        pixels = image[None].clone().requires_grad_(True)
        if score is None:
            value = model(classifier.normalize(pixels))[0, label]
        else:
            value = score(pixels)
        value.backward(inputs=[kept["T"], pixels], retain_graph=True)
        (gradient,) = torch.autograd.grad(value, kept["T"])
        maps.append((kept["T"] * gradient).sum(-1).detach()[0])
    for handle in handles:
        handle.remove()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return torch.stack(maps)


def to_pixels(scores, classifier, size):  # noqa: ANN001, ANN201
    if scores.ndim == 2:
        patches = scores[:, classifier.num_prefix_tokens :]
        rows = round((patches.shape[1] * size[0] / size[1]) ** 0.5)
        scores = patches.reshape(len(scores), rows, -1)
    return scores.repeat_interleave(size[0] // scores.shape[1], 1).repeat_interleave(size[1] // scores.shape[2], 2)[
        :, None
    ]


@pytest.mark.parametrize("key", TRANSFORMERS)
def test_equals_the_full_backward_pass(key: str) -> None:
    classifier = build(key, double=True)
    images, targets = pictures(classifier, double=True), torch.tensor([3, 7])
    ours = CDAM(classifier, upsample="nearest")._attribute(images, targets)
    slow = to_pixels(slow_cdam(classifier, images, targets), classifier, classifier.image_size)
    assert slow.abs().max() > 1e-6
    assert (ours - slow).abs().max() <= 1e-10 * max(1, float(slow.abs().max()))


@pytest.mark.parametrize("key", ["cls", "average", "eva02", "swin"])
def test_classes_differ(key: str) -> None:
    classifier = build(key)
    images = pictures(classifier)
    one, other = (CDAM(classifier).attribute(images, target) for target in (0, 1))
    assert torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1] < 0.9
    assert (one < 0).any() and (one > 0).any()


def test_non_square_images() -> None:
    classifier = build("cls", image_size=(96, 64), dynamic_img_size=True, double=True)
    images, targets = pictures(classifier, double=True), torch.tensor([1, 2])
    ours = CDAM(classifier, upsample="nearest")._attribute(images, targets)
    assert ours.shape == (2, 1, 96, 64)
    assert torch.allclose(ours, to_pixels(slow_cdam(classifier, images, targets), classifier, (96, 64)), atol=1e-10)


@pytest.mark.parametrize("key", ["average", "eva02", "swin"])
def test_integrated_equals_a_loop(key: str) -> None:
    classifier = build(key, double=True)
    images, targets = pictures(classifier, double=True), torch.tensor([3, 7])
    ours = CDAM(classifier, variant="integrated", runs=5, upsample="nearest", chunk_size=5)._attribute(images, targets)
    steps = [slow_cdam(classifier, images, targets, hidden_change=lambda h, k=k: h * (k / 5)) for k in range(1, 5)]
    expected = to_pixels(torch.stack(steps).mean(0), classifier, classifier.image_size)
    assert torch.allclose(ours, expected, rtol=1e-9, atol=1e-12)


def test_smooth_equals_a_loop_over_its_own_noise() -> None:
    classifier = build("cls", double=True)
    images, targets = pictures(classifier, double=True), torch.tensor([3, 7])
    explainer = CDAM(classifier, variant="smooth", runs=4, noise=0.05, seed=3, upsample="nearest", chunk_size=2)
    expected = 0
    for step in range(1, 5):

        def change(h, step=step):  # noqa: ANN001, ANN202
            draw = torch.randn(h.shape[1:], generator=torch.Generator().manual_seed(3 * 100_003 + step), dtype=h.dtype)
            return h + 0.05 * (h.max() - h.min()).detach() * draw

        expected = expected + slow_cdam(classifier, images, targets, hidden_change=change) / 4
    expected = to_pixels(expected, classifier, classifier.image_size)
    assert torch.allclose(explainer._attribute(images, targets), expected, rtol=1e-9, atol=1e-12)


def test_smooth_without_noise_is_vanilla() -> None:
    classifier = build("distilled", double=True)
    images = pictures(classifier, double=True)
    smooth = CDAM(classifier, variant="smooth", runs=3, noise=0.0).attribute(images, 1)
    assert torch.allclose(smooth, CDAM(classifier).attribute(images, 1))


@pytest.mark.parametrize("key", ["cls", "average", "attention_pool", "distilled"])
def test_concept_is_the_gradient_of_the_similarity(key: str) -> None:
    classifier = build(key, double=True)
    images, exemplars = pictures(classifier, double=True), pictures(classifier, 3, double=True, seed=9)
    model = classifier.model

    def latent(x):  # noqa: ANN001, ANN202
        return model.forward_head(model.forward_features(classifier.normalize(x)), pre_logits=True)

    concept = latent(exemplars).mean(0)
    ours = CDAM(classifier, variant="concept", exemplars=exemplars, upsample="nearest")._attribute(images, None)
    slow = slow_cdam(classifier, images, torch.tensor([0, 0]), score=lambda x: (latent(x) @ concept).sum())
    assert torch.allclose(ours, to_pixels(slow, classifier, classifier.image_size), rtol=1e-9, atol=1e-12)


def test_what_it_cant_serve_is_said_once() -> None:
    convnext = FrozenClassifier.from_timm("test_convnext", pretrained=False)
    with pytest.raises(ValueError, match="CDAM can't explain test_convnext: ConvNeXt has no last block") as caught:
        CDAM(convnext).attribute(torch.rand(1, 3, 160, 160))
    assert "rise" in str(caught.value)
    post_norm = FrozenClassifier.from_timm("test_vit", pretrained=False, block_fn=ResPostBlock)
    with pytest.raises(ValueError, match="CDAM can't explain test_vit: .*post-norm"):
        CDAM(post_norm).attribute(torch.rand(1, 3, 160, 160))


def test_smooth_on_a_model_without_a_plain_tail() -> None:
    with pytest.raises(ValueError, match="variant 'vanilla' works"):
        CDAM(build("pvt"), variant="smooth").attribute(torch.rand(1, 3, 64, 64))


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="vanilla, concept, smooth, integrated"):
        CDAM(build("cls"), variant="other")
    with pytest.raises(ValueError, match="exemplars"):
        CDAM(build("cls"), variant="concept")


@pytest.mark.slow
def test_cost_on_vit_base() -> None:
    classifier = FrozenClassifier.from_timm("vit_base_patch16_224", pretrained=False)
    image = torch.rand(1, 3, 224, 224)
    with FlopCounterMode(display=False) as plain, torch.no_grad():
        classifier(image)
    with FlopCounterMode(display=False) as ours:
        CDAM(classifier).attribute(image)
    assert ours.get_total_flops() <= 1.15 * plain.get_total_flops()
