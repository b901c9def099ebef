"""Logits by the class token alone: the model's own, value and gradient, and only where nothing else is meant."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.models.vision_transformer import Attention, Block, VisionTransformer
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


class Twice(nn.Linear):
    """As a quantised or low-rank layer might: a Linear by its type, not by what it does."""

    def forward(self, x):
        return 2 * super().forward(x)


class Mixed(nn.Module):
    """Not by token."""

    def forward(self, x):
        return x - x.mean(1, keepdim=True)


class Backwards(nn.Sequential):
    def forward(self, x):
        for block in reversed(self):
            x = block(x)
        return x


def retype(module: nn.Module, kind: type) -> None:
    module.__class__ = kind


def put(module: nn.Module, name: str, value: object) -> None:
    setattr(module, name, value)


def every_part(model: nn.Module, change) -> None:
    for part in model.modules():
        change(part)


CHANGES = {
    "hook on the block": lambda m: m.blocks[-1].register_forward_hook(lambda *_: None),
    "hook on a layer": lambda m: m.blocks[-1].attn.qkv.register_forward_pre_hook(lambda *_: None),
    "hook on the norm": lambda m: m.norm.register_forward_hook(lambda *_: None),
    "backward hook on the model": lambda m: m.register_full_backward_hook(lambda *_: None),
    "global hook": lambda _: torch.nn.modules.module.register_module_forward_hook(lambda *_: None),
    "block's forward": lambda m: put(m.blocks[-1], "forward", lambda x, **_: 2 * x),
    "attention's forward": lambda m: put(m.blocks[-1].attn, "forward", lambda x, **_: torch.zeros_like(x)),
    "features": lambda m: put(m, "forward_features", lambda x, **_: m.norm(2 * m.patch_embed(x))),
    "pooling": lambda m: put(m, "pool", lambda x, **_: x.mean(1)),
    "compiled": lambda m: m.compile(backend="eager"),
    "checkpoints": lambda m: m.set_grad_checkpointing(True),
    "attention taken apart": lambda m: every_part(m, lambda part: put(part, "fused_attn", False)),
    "dropout": lambda m: m.blocks[-1].attn.proj_drop.train(),
    "linear by type only": lambda m: retype(m.blocks[-1].attn.qkv, Twice),
    "mixing MLP": lambda m: put(m.blocks[-1], "mlp", nn.Sequential(m.blocks[-1].mlp, Mixed())),
    "mixing scale": lambda m: put(m.blocks[-1], "ls1", Mixed()),
    "mixing norm": lambda m: put(m, "norm", nn.Sequential(m.norm, Mixed())),
    "other order": lambda m: retype(m.blocks, Backwards),
}


@pytest.mark.parametrize("what", CHANGES)
def test_nothing_is_passed_by_that_watches_or_replaces(what) -> None:
    model = build()
    handle = CHANGES[what](model)
    try:
        assert not reads_class_token(model)
        if what not in ("dropout", "compiled"):
            classifier = FrozenClassifier(model, image_size=32)
            images = torch.rand(2, 3, 32, 32, dtype=torch.float64)
            assert torch.equal(classifier(images), classifier.model(classifier.normalize(images)))
    finally:
        if handle is not None and hasattr(handle, "remove"):
            handle.remove()
            assert reads_class_token(model)


@pytest.mark.parametrize("kind", [Block, Attention, VisionTransformer])
def test_a_method_replaced_for_all_is_not_passed_by(kind, monkeypatch) -> None:
    model, forward = build(), kind.forward
    assert reads_class_token(model)
    monkeypatch.setattr(kind, "forward", lambda self, x, **kwargs: 2 * forward(self, x, **kwargs))
    assert not reads_class_token(model)


def test_gradients_of_gradients_with_attention_taken_apart() -> None:
    model = build()
    every_part(model, lambda part: put(part, "fused_attn", False))
    classifier = FrozenClassifier(model, image_size=32)
    images = torch.rand(2, 3, 32, 32, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(classifier(images)[:, 0].sum(), images, create_graph=True)
    gradient.square().sum().backward()
    assert images.grad.abs().max() > 0


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
