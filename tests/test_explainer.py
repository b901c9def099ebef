"""The explainer's doors: what comes in, what goes out, what is refused."""

from __future__ import annotations

import pytest
import torch

import aha
from aha.baselines import build_explainer
from aha.baselines.build import BASELINES
from aha.classifier import FrozenClassifier
from aha.explainer import AmortizedExplainer, CallableExplainer, Explainer, as_images


class Brightness(Explainer):
    """Mean over channels, and a note of what it was called with."""

    name = "brightness"

    def _attribute(self, images, targets):
        self.called = images, targets
        return images.mean(1, keepdim=True)


@pytest.fixture
def explainer(vit):
    return Brightness(vit)


def test_uint8_and_float_are_the_same_picture(explainer):
    pixels = torch.randint(0, 256, (2, 3, 64, 96), dtype=torch.uint8)
    torch.testing.assert_close(explainer.attribute(pixels), explainer.attribute(pixels.float() / 255))
    assert explainer.called[0].max() <= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_maps_are_float32_and_detached(explainer, dtype):
    images = torch.rand(2, 3, 64, 96).to(dtype).requires_grad_()
    maps = explainer.attribute(images)
    assert maps.dtype == torch.float32
    assert maps.shape == (2, 1, 64, 96)
    assert not maps.requires_grad
    assert images.grad is None


def test_the_callers_images_stay_as_they_are(vit):
    class Careless(Brightness):
        def _attribute(self, images, targets):
            images.requires_grad_()
            (grad,) = torch.autograd.grad(self.classifier(images).sum(), images)
            return grad.sum(1, keepdim=True)

    images = torch.rand(1, 3, 64, 96)
    Careless(vit).attribute(images)
    assert not images.requires_grad


def test_targets_arrive_resolved(explainer):
    images = torch.rand(2, 3, 64, 96)
    explainer.attribute(images)
    assert explainer.called[1] is None
    for given, expected in ((3, [3, 3]), ([1, 2], [1, 2]), (torch.tensor([0, 6]), [0, 6])):
        explainer.attribute(images, given)
        assert explainer.called[1].tolist() == expected
        assert explainer.called[1].dtype == torch.int64
    with pytest.raises(ValueError, match="0…6"):
        explainer.attribute(images, 7)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.rand(3, 64, 96), "batch, 3"),
        (torch.rand(1, 1, 64, 96), "RGB"),
        (torch.rand(1, 64, 96, 3), "RGB"),
        (torch.randn(1, 3, 64, 96), "Normalisation happens inside"),
        (torch.rand(1, 3, 64, 96) * 255, "uint8"),
        (torch.zeros(1, 3, 64, 96, dtype=torch.int64), "int64"),
        (torch.zeros(1, 3, 64, 96, dtype=torch.bool), "bool"),
        (torch.full((1, 3, 64, 96), torch.nan), "nan"),
    ],
)
def test_refused_images(explainer, images, message):
    with pytest.raises(ValueError, match=message):
        explainer.attribute(images)


def test_as_images_allows_rounding_and_empty_batches():
    assert as_images(torch.full((1, 3, 2, 2), 1.0005)).dtype == torch.float32
    assert as_images(torch.empty(0, 3, 4, 4)).shape == (0, 3, 4, 4)
    assert as_images(torch.rand(1, 3, 2, 2, dtype=torch.float64)).dtype == torch.float64
    assert as_images(torch.full((1, 3, 2, 2), 255, dtype=torch.uint8)).unique().tolist() == [1.0]


@pytest.mark.parametrize("shape", [(2, 1, 32, 48), (2, 3, 64, 96), (1, 1, 64, 96), (2, 64, 96), (2, 1, 96, 64)])
def test_maps_of_another_shape_are_refused(vit, shape):
    class Wrong(Explainer):
        name = "wrong"

        def _attribute(self, images, targets):
            return torch.zeros(shape)

    with pytest.raises(ValueError, match=r"wrong returned maps.*\(2, 1, 64, 96\)"):
        Wrong(vit).attribute(torch.rand(2, 3, 64, 96))


def test_any_callable(vit):
    calls = []

    def function(images, targets):
        calls.append(targets)
        return (images[:, 0] * targets.view(-1, 1, 1)).numpy()

    explainer = CallableExplainer(vit, function, "red")
    images = torch.rand(2, 3, 64, 96)
    maps = explainer.attribute(images)
    predicted = vit(images).argmax(-1)
    assert torch.equal(calls[0], predicted)
    torch.testing.assert_close(maps, images[:, :1] * predicted.view(-1, 1, 1, 1))
    torch.testing.assert_close(explainer.attribute(images, 3), images[:, :1] * 3)
    assert explainer.name == "red"


def test_nan_is_passed_on(vit):
    explainer = CallableExplainer(vit, lambda images, _: images[:, :1] * torch.nan, "broken")
    assert explainer.attribute(torch.rand(1, 3, 64, 96)).isnan().all()


def test_images_of_another_size_are_named() -> None:
    tiny = {"depth": 1, "embed_dim": 24, "num_heads": 2}
    classifier = FrozenClassifier.from_timm("vit_tiny_patch16_224", pretrained=False, image_size=64, **tiny)
    for explainer in (aha.AmortizedExplainer(classifier, width=8), aha.CDAM(classifier)):
        with pytest.raises(ValueError, match="images are 96×96, vit_tiny_patch16_224 takes 64×64"):
            explainer.attribute(torch.rand(1, 3, 96, 96))


@pytest.mark.parametrize("name", [*BASELINES, "aha"])
def test_an_empty_batch_is_refused_in_one_sentence(name):
    classifier = FrozenClassifier.from_timm("test_vit", pretrained=False, image_size=32)
    explainer = AmortizedExplainer(classifier, width=8) if name == "aha" else build_explainer(name, classifier)
    with pytest.raises(ValueError, match=r"There is no image to explain: the batch is \(0, 3, 32, 32\)"):
        explainer.attribute(torch.rand(0, 3, 32, 32))
