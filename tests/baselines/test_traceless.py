"""Explaining leaves no trace: one test over all explainers, on success and on an error half-way."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from tiny_models import build, pictures

from aha.baselines import BASELINES, build_explainer
from aha.classifier import FrozenClassifier

SPECS = [
    "cdam",
    "cdam(variant=smooth, runs=3)",
    "cdam(variant=integrated, runs=3)",
    "gradskip",
    "gradskip(rescale=False)",
    "rollout",
    "rise(num_masks=20)",
    "input_gradient",
    "input_gradient(times_input=True)",
    "random",
    "centre_prior",
    "captum:IntegratedGradients(n_steps=3)",
    "captum:LayerGradCam",
    "captum:LayerGradientXActivation",
    "captum:Occlusion",
    "captum:GradientShap",
    "captum:Saliency",
    "captum:FeatureAblation",
    "captum:GuidedBackprop",
    "captum:DeepLift",
    "user_explainers:Meddling",
]
# Draws random numbers over the whole batch.
BATCH_DEPENDENT = ("captum:GradientShap",)


def state_of(classifier: FrozenClassifier) -> tuple:
    """Everything an explainer could leave behind."""
    values = {k: v.clone() for k, v in [*classifier.named_parameters(), *classifier.named_buffers()]}
    flags = {
        name: {
            key: list(value.items()) if "hooks" in key else value
            for key, value in vars(module).items()
            if "hooks" in key
            or key in ("training", "fused_attn", "forward", "_compiled_call_impl", "grad_checkpointing")
        }
        for name, module in classifier.named_modules()
    }
    grads = [(p.requires_grad, p.grad) for p in classifier.parameters()]
    return values, flags, grads, (torch.random.get_rng_state(), np.random.get_state()[1].copy())


def assert_same(before: tuple, after: tuple) -> None:
    assert before[0].keys() == after[0].keys()
    assert all(torch.equal(before[0][key], after[0][key]) for key in before[0])
    assert before[1] == after[1]
    assert before[2] == after[2]
    assert torch.equal(before[3][0], after[3][0]) and (before[3][1] == after[3][1]).all()


class Bomb(Exception):
    pass


@pytest.fixture(params=["cls", "average"])
def classifier(request: pytest.FixtureRequest) -> FrozenClassifier:
    return build(request.param)


@pytest.mark.parametrize("spec", SPECS)
def test_no_trace(classifier: FrozenClassifier, spec: str) -> None:
    images = pictures(classifier)
    kept = images.clone()
    explainer = build_explainer(spec, classifier)
    before = state_of(classifier)
    with torch.no_grad():  # gradients are the explainer's own business
        maps = explainer.attribute(images, 1)
    assert maps.shape == (2, 1, 64, 64) and maps.isfinite().all() and not maps.requires_grad
    assert_same(before, state_of(classifier))
    assert torch.equal(images, kept) and not images.requires_grad and torch.is_grad_enabled()
    with torch.inference_mode():
        assert torch.allclose(explainer.attribute(pictures(classifier), 1), maps, atol=1e-6)
    assert_same(before, state_of(classifier))


@pytest.mark.parametrize("spec", [s for s in SPECS if s.split("(")[0] not in ("random", "centre_prior")])
def test_no_trace_of_an_error_half_way(classifier: FrozenClassifier, spec: str) -> None:
    explainer = build_explainer(spec, classifier)

    def explode(*_: object) -> None:
        raise Bomb

    handle = classifier.model.blocks[-1].mlp.register_forward_pre_hook(explode)
    before = state_of(classifier)
    with pytest.raises(Bomb):
        explainer.attribute(pictures(classifier), 1)
    assert_same(before, state_of(classifier))
    assert torch.is_grad_enabled()
    handle.remove()


def test_no_trace_of_an_error_in_the_backward_pass() -> None:
    classifier = build("cls")

    def explode(_grad: torch.Tensor) -> None:
        raise Bomb

    def arm(_module: object, _args: tuple, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(explode)

    handle = classifier.model.blocks[-1].attn.proj.register_forward_hook(arm)
    before = state_of(classifier)
    for spec in ("cdam", "gradskip", "input_gradient", "captum:Saliency"):
        with pytest.raises(Bomb):
            build_explainer(spec, classifier).attribute(pictures(classifier), 1)
        assert_same(before, state_of(classifier))
    handle.remove()


@pytest.mark.parametrize("spec", SPECS)
def test_a_batch_of_eight_is_eight_batches_of_one(spec: str) -> None:
    if spec in BATCH_DEPENDENT:
        pytest.skip("draws its noise over the whole batch")
    classifier = build("cls")
    images = pictures(classifier, 8)
    explainer = build_explainer(spec, classifier)
    singles = torch.cat([explainer.attribute(image[None]) for image in images])
    together = explainer.attribute(images)
    assert torch.allclose(together, singles, rtol=1e-3, atol=1e-3 * float(singles.abs().max()))


@pytest.mark.parametrize("spec", ["cdam", "gradskip", "rollout", "input_gradient", "rise(num_masks=20)"])
@pytest.mark.parametrize("key", ["cls", "swin"])
def test_bfloat16_autocast(spec: str, key: str) -> None:
    classifier = build(key)
    images = pictures(classifier)
    explainer = build_explainer(spec, classifier)
    full = explainer.attribute(images, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = explainer.attribute(images, 1)
    assert half.dtype == torch.float32 and half.isfinite().all()
    assert torch.corrcoef(torch.stack([full.flatten(), half.flatten()]))[0, 1] > 0.97


@pytest.mark.parametrize("spec", ["cdam", "gradskip", "rollout", "input_gradient", "captum:LayerGradCam"])
def test_two_hundred_calls_leave_memory_flat(spec: str) -> None:
    classifier = build("distilled")  # two blocks only
    images = pictures(classifier, 1)
    explainer = build_explainer(spec, classifier)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    explainer.attribute(images)
    before = tensors()
    for _ in range(200):
        explainer.attribute(images)
    assert tensors() == before


@pytest.mark.parametrize("how", ["in place", "model in place", "wrapped model"])
def test_compiled_models_are_served(how: str) -> None:
    plain = build("cls")
    images = pictures(plain)
    specs = ("cdam", "gradskip", "rollout", "input_gradient", "captum:LayerGradCam")
    expected = {spec: build_explainer(spec, plain).attribute(images, 1) for spec in specs}
    if how == "in place":
        plain.compile(backend="eager")
    elif how == "model in place":
        plain.model.compile(backend="eager")
    else:
        plain.model = torch.compile(plain.model, backend="eager")
    logits = plain(images)
    before = state_of(plain)
    for spec in specs:
        assert torch.allclose(build_explainer(spec, plain).attribute(images, 1), expected[spec], atol=1e-6)
        assert_same(before, state_of(plain))
    assert torch.equal(plain(images), logits)


def test_compiled_layers_are_refused() -> None:
    classifier = build("cls")
    classifier.model.blocks[1] = torch.compile(classifier.model.blocks[1], backend="eager")
    for spec in ("cdam", "gradskip"):
        with pytest.raises(ValueError, match=r"model\.blocks\.1 .*was wrapped by torch\.compile"):
            build_explainer(spec, classifier).attribute(pictures(classifier))


def test_gradient_checkpointing_is_no_obstacle() -> None:
    classifier = build("cls")
    images = pictures(classifier)
    for spec in ("cdam", "gradskip", "input_gradient"):
        expected = build_explainer(spec, classifier).attribute(images, 1)
        classifier.model.set_grad_checkpointing(True)
        before = state_of(classifier)
        assert torch.equal(build_explainer(spec, classifier).attribute(images, 1), expected)
        assert_same(before, state_of(classifier))
        classifier.model.set_grad_checkpointing(False)


def test_every_built_in_is_covered() -> None:
    assert {spec.split("(")[0] for spec in SPECS} >= BASELINES.keys() - {"object_mask"}
