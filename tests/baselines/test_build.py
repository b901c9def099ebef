"""Explainers by name, and the simple ones by their definition."""

from __future__ import annotations

import sys

import pytest
import torch
from tiny_models import build, pictures

from aha.baselines import BASELINES, CDAM, RISE, CaptumExplainer, build_explainer
from aha.baselines.build import parse_spec
from aha.baselines.geometry import token_grid
from aha.explainer import CallableExplainer


@pytest.fixture(scope="module")
def classifier():  # noqa: ANN201
    return build("cls")


def test_specs(classifier) -> None:  # noqa: ANN001
    images = pictures(classifier)
    simple = {"rise", "input_gradient", "random", "centre_prior", "object_mask"}
    assert set(BASELINES) == simple | {"cdam", "gradskip", "rollout"}
    smooth = build_explainer("cdam(variant=smooth, runs=7)", classifier, seed=3)
    assert isinstance(smooth, CDAM) and (smooth.variant, smooth.runs, smooth.seed) == ("smooth", 7, 3)
    assert smooth.name == "cdam(variant=smooth, runs=7)"
    assert build_explainer("rise", classifier, num_masks=9).name == "rise(num_masks=9)"
    assert isinstance(build_explainer("captum:Saliency", classifier), CaptumExplainer)
    assert build_explainer("user_explainers:Mean", classifier).name == "mean"
    function = build_explainer("user_explainers:red(gain=2.0)", classifier)
    assert isinstance(function, CallableExplainer)
    assert torch.equal(function.attribute(images), images[:, :1] * 2)
    assert torch.equal(
        build_explainer("user_explainers:make(power=2)", classifier).attribute(images), images[:, 1:2] ** 2
    )


def test_parsing() -> None:
    assert parse_spec("a") == parse_spec("a()") == ("a", {})
    assert parse_spec("m.n:f(a=1, b=x, c=None, d=true, e='y', f=(1, 2))") == (
        "m.n:f",
        {"a": 1, "b": "x", "c": None, "d": True, "e": "y", "f": (1, 2)},
    )
    for wrong in ("", "a b", "a(1)", "a(x=)", "a(**k)", "a(x=1", "a:b:c"):
        with pytest.raises(ValueError, match="option"):
            parse_spec(wrong)


@pytest.mark.parametrize(
    ("spec", "error", "says"),
    [
        ("gradskipp", ValueError, "Nearest: gradskip"),
        ("rise(masks=3)", ValueError, "no option masks.*num_masks"),
        ("captum:IntegratedGradient", ValueError, "Nearest: IntegratedGradients"),
        ("captum:NoiseTunnel", ValueError, "by itself"),
        ("captum:Saliency(depth=3)", ValueError, "no option depth.*abs"),
        ("nowhere_to_be_found:f", ImportError, "nowhere_to_be_found"),
        ("user_explainers:rad", ValueError, "Nearest: .*red"),
        ("user_explainers:GAIN", ValueError, "neither an Explainer nor a function"),
    ],
)
def test_wrong_names(classifier, spec: str, error: type, says: str) -> None:  # noqa: ANN001
    with pytest.raises(error, match=says):
        build_explainer(spec, classifier)


def test_captum_missing(classifier, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN001
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    with pytest.raises(ImportError, match=r"aha\[compare\]"):
        build_explainer("captum:Saliency", classifier)


@pytest.mark.parametrize("key", ["convnext", "swin", "pvt", "cls"])
def test_layer_grad_cam_is_grad_cam(key: str) -> None:
    """Mean gradient over positions times activation, at the feature layer, as a map of the right orientation."""
    classifier = build(key)
    images = pictures(classifier)
    model = classifier.model
    layer = {"convnext": "stages.3", "swin": "layers.1", "pvt": "stages.3", "cls": "blocks.5.norm1"}[key]
    kept = {}

    def keep(_module, _args, output):  # noqa: ANN001, ANN202
        kept["layer"] = output.detach().requires_grad_(True)
        return kept["layer"]

    handle = model.get_submodule(layer).register_forward_hook(keep)
    (gradient,) = torch.autograd.grad(classifier(images)[:, 2].sum(), kept["layer"])
    handle.remove()
    activation = kept["layer"].detach()
    if key == "cls":
        activation, gradient = (t[:, 1:].transpose(1, 2).reshape(2, -1, 4, 4) for t in (activation, gradient))
    elif key == "swin":
        activation, gradient = activation.permute(0, 3, 1, 2), gradient.permute(0, 3, 1, 2)
    expected = (activation * gradient.mean((2, 3), keepdim=True)).sum(1, keepdim=True)
    ours = build_explainer("captum:LayerGradCam", classifier).attribute(images, 2)
    expected = torch.nn.functional.interpolate(expected, size=ours.shape[-2:], mode="bilinear")
    assert torch.allclose(ours, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_rise_equals_a_loop(classifier) -> None:  # noqa: ANN001
    images = pictures(classifier)
    explainer = RISE(classifier, num_masks=11, cells=4, seed=5, chunk_size=4)
    grids, shifts = explainer._draw((64, 64))
    masks = explainer._masks(grids.float(), shifts, (64, 64))
    assert masks.shape == (11, 64, 64) and 0.3 < masks.mean() < 0.7 and masks.amin() >= 0 and masks.amax() <= 1
    expected = torch.zeros(2, 64, 64)
    for image, row in zip(images, expected, strict=True):
        for mask in masks:
            normalised = classifier.normalize(image[None]) * mask
            row += classifier.model(normalised).softmax(-1)[0, 3] * mask / (11 * 0.5)
    assert torch.allclose(explainer.attribute(images, 3)[:, 0], expected, atol=1e-5)
    for chunk_size in (1, 3, 64):
        other = RISE(classifier, num_masks=11, cells=4, seed=5, chunk_size=chunk_size).attribute(images, 3)
        assert torch.allclose(other[:, 0], expected, atol=1e-5)


def test_random_depends_on_image_and_seed_alone(classifier) -> None:  # noqa: ANN001
    images = pictures(classifier)
    maps = build_explainer("random", classifier).attribute(images)
    assert maps.unique().numel() == 2 * 49 and not torch.equal(maps[0], maps[1])
    assert torch.equal(build_explainer("random", classifier).attribute(images.flip(0)), maps.flip(0))
    assert not torch.equal(build_explainer("random(seed=1)", classifier).attribute(images), maps)
    assert build_explainer("random(grid=None)", classifier).attribute(images)[0].unique().numel() > 4000


def test_centre_prior_peaks_in_the_centre(classifier) -> None:  # noqa: ANN001
    maps = build_explainer("centre_prior", classifier).attribute(torch.rand(1, 3, 65, 33))
    assert int(maps.argmax()) == 32 * 33 + 16


def test_object_mask(classifier) -> None:  # noqa: ANN001
    explainer, images = build_explainer("object_mask", classifier), pictures(classifier)
    masks = torch.rand(2, 1, 64, 64) > 0.5
    assert explainer.uses_masks and torch.equal(explainer.attribute(images, masks=masks), masks.float())
    with pytest.raises(ValueError, match="needs masks"):
        explainer.attribute(images)


def test_input_gradient(classifier) -> None:  # noqa: ANN001
    images = pictures(classifier)
    pixels = images.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(classifier(pixels)[:, 3].sum(), pixels)
    plain = build_explainer("input_gradient(blur=0)", classifier).attribute(images, 3)
    assert torch.allclose(plain, gradient.abs().sum(1, keepdim=True), rtol=1e-4)
    signed = build_explainer("input_gradient(times_input=True, blur=0)", classifier).attribute(images, 3)
    assert torch.allclose(signed, (gradient * (images - classifier.mean)).sum(1, keepdim=True), rtol=1e-3, atol=1e-6)
    smooth = build_explainer("input_gradient", classifier).attribute(images, 3)
    assert smooth.std() < plain.std()


def test_token_grids(classifier) -> None:  # noqa: ANN001
    assert token_grid(classifier, 16, (64, 64)) == (4, 4)
    assert token_grid(classifier, 24, (96, 64)) == (6, 4)
    assert token_grid(classifier, 24, (64, 96)) == (4, 6)
    assert token_grid(classifier, 17, (64, 64)) is None and token_grid(classifier, 0, (64, 64)) is None
