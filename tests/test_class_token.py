"""Logits by the class token alone: the model's own, value and gradient, and only where nothing else is meant."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from aha.class_token import class_token_logits, reads_class_token
from aha.classifier import FrozenClassifier

SMALL = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5)


def build(name: str = "vit_tiny_patch16_224", **changes) -> nn.Module:
    """Weights that no symmetry or zero bias can hide behind."""
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, **SMALL | changes).double().eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qkv_bias": False},
        {"qk_norm": True},
        {"scale_attn_norm": True},
        {"init_values": 0.1},
        {"reg_tokens": 3},
        {"no_embed_class": True},
        {"pre_norm": True},
        {"depth": 1},
        {"scale_mlp_norm": True},
        {"dynamic_img_size": True, "image": (48, 24)},
    ],
    ids=str,
)
def test_logits_and_gradients_are_the_models_own(changes) -> None:
    size = changes.pop("image", (32, 32))
    model = build(**changes)
    assert reads_class_token(model)
    images = torch.randn(3, 3, *size, dtype=torch.float64, requires_grad=True)
    expected, found = model(images), class_token_logits(model, images)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
    weights = torch.randn_like(expected)
    gradients = [torch.autograd.grad((logits * weights).sum(), images)[0] for logits in (expected, found)]
    assert gradients[0].abs().max() > 1e-3
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("vit_tiny_patch16_224", {"global_pool": "avg"}),
        ("vit_tiny_patch16_224", {"global_pool": "map"}),
        ("deit_tiny_distilled_patch16_224", {}),
        ("vit_tiny_patch16_224", {"block_fn": timm.models.vision_transformer.ParallelScalingBlock}),
    ],
    ids=str,
)
def test_other_models_run_as_they_are(name, changes) -> None:
    model = build(name, **changes)
    assert not reads_class_token(model)
    classifier = FrozenClassifier(model, image_size=32)
    images = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    assert torch.equal(classifier(images), model(classifier.normalize(images)))


def watch(model: nn.Module, what: str) -> object:
    block = model.blocks[-1]
    if what == "hook on the block":
        return block.register_forward_hook(lambda *_: None)
    if what == "hook on the attention's projection":
        return block.attn.qkv.register_forward_pre_hook(lambda *_: None)
    if what == "backward hook on the model":
        return model.register_full_backward_hook(lambda *_: None)
    if what == "another forward":
        block.attn.forward = lambda x, **_: torch.zeros_like(x)
    elif what == "compiled":
        model.compile(backend="eager")
    elif what == "checkpoints":
        model.set_grad_checkpointing(True)
    return None


@pytest.mark.parametrize(
    "what",
    [
        "hook on the block",
        "hook on the attention's projection",
        "backward hook on the model",
        "another forward",
        "compiled",
        "checkpoints",
    ],
)
def test_nothing_is_passed_by_that_watches_or_replaces(what) -> None:
    model = build()
    handle = watch(model, what)
    assert not reads_class_token(model)
    if handle is not None:
        handle.remove()
        assert reads_class_token(model)


def test_the_classifier_takes_the_short_way_and_hooks_see_all_tokens() -> None:
    classifier = FrozenClassifier(build(), image_size=32)
    images, seen = torch.rand(2, 3, 32, 32, dtype=torch.float64), []
    block = classifier.model.blocks[-1]
    short = classifier(images)
    mlp = block.mlp.fc1.weight.shape[1]
    handle = block.mlp.register_forward_hook(lambda _m, args, _o: seen.append(args[0].shape))
    plain = classifier(images)
    handle.remove()
    assert seen == [(2, 17, mlp)]
    torch.testing.assert_close(short, plain, atol=1e-12, rtol=1e-10)
    block.norm2.register_forward_hook(lambda _m, args, _o: seen.append(args[0].shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aha.classifier.reads_class_token", lambda _: True)
        classifier(images)
    assert seen[1:] == [(2, 1, mlp)]
