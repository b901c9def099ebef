"""Refinement: never worse on its own objective, each sample as if alone, nothing left behind."""

from __future__ import annotations

import copy

import pytest
import torch

import aha
from aha.refinement import RefineOptions, refine, self_check

SIZE = 32


@pytest.fixture(scope="module")
def explainer() -> aha.AmortizedExplainer:
    torch.manual_seed(0)
    classifier = aha.FrozenClassifier.from_timm("test_vit", pretrained=False, image_size=SIZE, num_classes=6)
    explainer = aha.AmortizedExplainer(classifier, width=16)
    torch.nn.init.normal_(explainer.head.output.weight)
    return explainer


def options(**changes) -> RefineOptions:
    return RefineOptions(**dict(grids=[4], references=["mean"], num_fractions=3, step_size=0.1) | changes)


@pytest.mark.parametrize("mode", ["map", "head"])
def test_never_worse_and_kept_where_nothing_gained(explainer, mode: str) -> None:
    images = torch.rand(3, 3, SIZE, SIZE)
    start = explainer.attribute(images)
    refined = refine(explainer, images, options=options(mode=mode, step_size=0.01))
    assert (refined.after <= refined.before).all()
    assert (refined.after < refined.before).any()
    targets = explainer.classifier(images).argmax(-1)
    torch.testing.assert_close(
        self_check(explainer.classifier, images, refined.maps, targets, options()), refined.after, atol=1e-5, rtol=0
    )
    nothing = refine(explainer, images, options=options(mode=mode, steps=0))
    assert torch.equal(nothing.maps, start)
    assert (nothing.step == 0).all()


@pytest.mark.parametrize("mode", ["map", "head"])
def test_batch_equals_one_by_one(explainer, mode: str) -> None:
    images = torch.rand(3, 3, SIZE, SIZE)
    targets = torch.tensor([0, 2, 5])
    together = refine(explainer, images, targets, options=options(mode=mode))
    for i in range(3):
        alone = refine(explainer, images[i : i + 1], targets[i : i + 1], options=options(mode=mode))
        torch.testing.assert_close(together.maps[i], alone.maps[0], atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(together.after[i], alone.after[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", ["map", "head"])
def test_leaves_head_and_classifier_bit_identical(explainer, mode: str) -> None:
    before = copy.deepcopy([explainer.head.state_dict(), explainer.classifier.state_dict()])
    refine(explainer, torch.rand(2, 3, SIZE, SIZE), options=options(mode=mode))
    after = [explainer.head.state_dict(), explainer.classifier.state_dict()]
    for old, new in zip(before, after, strict=True):
        assert all(torch.equal(old[key], new[key]) for key in old)
    assert all(p.grad is None for module in (explainer.head, explainer.classifier) for p in module.parameters())


@pytest.mark.parametrize("mode", ["map", "head"])
def test_stated_cost_is_the_measured_cost(explainer, mode: str) -> None:
    images = torch.rand(2, 3, SIZE, SIZE)
    maps = explainer.attribute(images)
    seen = []
    handle = explainer.classifier.model.register_forward_hook(
        lambda _m, inputs, output: seen.append((len(output), output.requires_grad))
    )
    try:
        targets = torch.tensor([1, 1])
        refined = refine(explainer, images, targets, maps=maps, options=options(mode=mode, grids=[2, 4]))
    finally:
        handle.remove()
    perturbed = sum(n for n, _ in seen) - len(images)  # the clean pass that resolves targets
    assert perturbed == refined.forwards * len(images)
    assert sum(n for n, grad in seen if grad) == refined.backwards * len(images)


def test_works_within_inference_mode(explainer) -> None:
    with torch.inference_mode():
        images = torch.rand(2, 3, SIZE, SIZE)
        for mode in ("map", "head"):
            refined = refine(explainer, images, options=options(mode=mode))
            assert (refined.after <= refined.before).all()


def test_non_finite_samples_come_back_unrefined_and_flagged(explainer) -> None:
    images = torch.rand(3, 3, SIZE, SIZE)
    maps = explainer.attribute(images)
    maps[1, 0, 0, 0] = torch.nan
    refined = refine(explainer, images, maps=maps, options=options())
    assert refined.failed.tolist() == [False, True, False]
    assert torch.equal(refined.maps[1].isnan(), maps[1].isnan())
    assert refined.maps[[0, 2]].isfinite().all()
    clean = refine(explainer, images[[0, 2]], maps=maps[[0, 2]], options=options())
    torch.testing.assert_close(clean.maps, refined.maps[[0, 2]], atol=1e-3, rtol=1e-3)


def test_head_mode_needs_a_head(explainer) -> None:
    other = aha.CallableExplainer(explainer.classifier, lambda x, t: x.mean(1, keepdim=True), "brightness")
    with pytest.raises(ValueError, match="brightness has no head: use mode='map'"):
        refine(other, torch.rand(1, 3, SIZE, SIZE), options=options(mode="head"))
    assert refine(other, torch.rand(1, 3, SIZE, SIZE), options=options()).maps.shape == (1, 1, SIZE, SIZE)


def test_bad_options_are_named() -> None:
    with pytest.raises(ValueError, match="steps ≥ 0"):
        RefineOptions(steps=-1)


def test_the_callers_images_and_wrong_maps(explainer) -> None:
    images = torch.rand(2, 3, SIZE, SIZE).requires_grad_()
    refine(explainer, images, options=options(mode="head", steps=1))
    assert images.grad is None
    with pytest.raises(ValueError, match="maps must be .2, 1, 32, 32. for these images, got .1, 1, 32, 32."):
        refine(explainer, images, maps=torch.rand(1, 1, SIZE, SIZE), options=options())
