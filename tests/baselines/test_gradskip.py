"""GradSkip: its parts against textbook values, conservation, completeness, counted cost."""

from __future__ import annotations

import contextlib

import pytest
import torch
from tiny_models import TRANSFORMERS, build, pictures
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from aha.baselines import GradSkip, MaskedLogits
from aha.baselines.capture import capture_attention
from aha.baselines.completeness import complete_gradients
from aha.baselines.gradskip import gini
from aha.baselines.propagation import TokenLayout, layout_of, propagate, regrid
from aha.baselines.traceless import differentiable
from aha.classifier import FrozenClassifier


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1, 1, 1, 1], 0), ([0, 0, 0, 5], 3 / 4), ([1, 2, 3, 4, 5], 4 / 15), ([5, 1, 4, 2, 3], 4 / 15), ([0, 0, 0], 0)],
)
def test_gini_textbook(values: list[float], expected: float) -> None:
    assert float(gini(torch.tensor(values, dtype=torch.float64))) == pytest.approx(expected)


def test_gini_is_half_the_relative_mean_difference() -> None:
    values = torch.rand(5, 3, 17, dtype=torch.float64)
    pairs = (values[..., :, None] - values[..., None, :]).abs().mean((-2, -1))
    assert torch.allclose(gini(values), pairs / (2 * values.mean(-1)))


def test_head_weights() -> None:
    maps = torch.rand(3, 4, 6, 6).softmax(-1)
    flow = torch.tensor([[1.0, 2, 3, 0.1], [0, 0, 0, 0], [5, 0, 0, 0]])
    classifier = build("cls")
    weights = {a: GradSkip(classifier, alpha=a, threshold=0.1).head_weights(flow, maps, 3) for a in (0, 0.5, 1)}
    for weight in weights.values():
        assert torch.allclose(weight.sum(1), torch.ones(3))
    sparsity = gini(maps).mean(-1)
    assert torch.allclose(weights[0], sparsity / sparsity.sum(1, keepdim=True))
    # 0.1 lies below a tenth of the largest flow; a model without any flow weighs heads equally.
    assert torch.allclose(weights[1], torch.tensor([[1 / 6, 2 / 6, 3 / 6, 0], [1 / 4] * 4, [1, 0, 0, 0]]))
    assert torch.allclose(weights[0.5], (weights[0] + weights[1]) / 2)


def records_of(classifier: FrozenClassifier, images: torch.Tensor) -> list:
    with differentiable(classifier, images) as (plain, pixels), torch.no_grad():
        with capture_attention(plain, "test") as records:
            plain.forward(pixels)
    return records


@pytest.mark.parametrize("key", TRANSFORMERS)
def test_relevance_is_conserved_through_every_block(key: str) -> None:
    classifier = build(key, double=True)
    images = pictures(classifier, double=True)
    generator = torch.Generator().manual_seed(1)
    relevance = behind = None
    for record in reversed(records_of(classifier, images)):
        layout = layout_of(classifier, "test", record, 2, classifier.image_size)
        if behind is None:
            relevance = torch.rand(2, layout.tokens, generator=generator, dtype=torch.float64)
            total = relevance.sum(1)
        else:
            relevance = regrid(relevance, behind, layout)
            assert torch.allclose(relevance.sum(1), total)
        weights = record.attention.sum(1)
        weights[:, 0] = 0  # a row without any weight
        gate = torch.rand(2, layout.tokens, generator=generator, dtype=torch.float64)
        magnitude = torch.rand(2, layout.tokens, generator=generator, dtype=torch.float64)
        relevance = propagate(relevance, weights, gate, layout, magnitude)
        assert torch.allclose(relevance.sum(1), total) and (relevance >= 0).all()
        behind = layout


def test_one_step_equals_a_loop() -> None:
    relevance, gate = torch.rand(1, 5, dtype=torch.float64), torch.rand(1, 5, dtype=torch.float64)
    weights, magnitude = torch.rand(1, 5, 5, dtype=torch.float64), torch.rand(1, 5, dtype=torch.float64)
    expected = (1 - gate[0]) * relevance[0]
    for i in range(5):
        row = weights[0, i] * magnitude[0]
        for j in range(5):
            expected[j] += gate[0, i] * relevance[0, i] * row[j] / row.sum()
    assert torch.allclose(propagate(relevance, weights, gate, TokenLayout(5, (1, 5), keys=5), magnitude)[0], expected)


def test_reduced_keys_equal_an_upsampled_map() -> None:
    classifier = build("pvt", double=True)
    record = records_of(classifier, pictures(classifier, double=True))[0]
    layout = layout_of(classifier, "test", record, 2, classifier.image_size)
    assert layout.grid == (16, 16) and layout.keys == 4
    weights = record.attention.mean(1)
    full = weights.view(2, 256, 2, 2).repeat_interleave(8, 2).repeat_interleave(8, 3).flatten(2)
    relevance, magnitude = torch.rand(2, 256, dtype=torch.float64), torch.rand(2, 256, dtype=torch.float64)
    gate = torch.full((2, 1), 0.7, dtype=torch.float64)
    ours = propagate(relevance, weights, gate, layout, magnitude)
    assert torch.allclose(ours, propagate(relevance, full, gate, TokenLayout(256, (16, 16), keys=256), magnitude))


@pytest.mark.parametrize(("grid", "window", "shift"), [((8, 8), (4, 4), (2, 2)), ((7, 10), (4, 4), (2, 1))])
def test_windows_are_timms(grid: tuple, window: tuple, shift: tuple) -> None:
    from timm.models.swin_transformer import window_partition

    layout = TokenLayout(grid[0] * grid[1], grid, window, shift)
    values = torch.rand(2, layout.tokens)
    image = values.view(2, *grid, 1).roll((-shift[0], -shift[1]), (1, 2))
    padded = nn.functional.pad(image, (0, 0, 0, -grid[1] % window[1], 0, -grid[0] % window[0]))
    assert torch.equal(layout.split(values), window_partition(padded, window).flatten(1))
    assert torch.equal(layout.merge(layout.split(values)), values)


def test_a_block_whose_attention_contributes_nothing_passes_relevance_through() -> None:
    classifier = build("average")
    block = classifier.model.blocks[-1]
    for parameter in block.attn.proj.parameters():
        parameter.zero_()
    explainer = GradSkip(classifier, rescale=False)
    relevance = torch.rand(2, 17)
    seen = {}
    step = explainer._step

    def watch(incoming, record, *args):  # noqa: ANN001, ANN002, ANN202
        outgoing = step(incoming, record, *args)
        seen[record.name] = incoming, outgoing
        return outgoing

    explainer._step = watch
    explainer.attribute(pictures(classifier), 0)
    incoming, outgoing = seen["blocks.7"]
    assert torch.equal(incoming, outgoing) and relevance.shape == (2, 17)
    incoming, outgoing = seen["blocks.6"]
    assert not torch.allclose(incoming, outgoing)


def test_cls_models_start_at_the_cls_token() -> None:
    tokens, gradient = torch.rand(2, 5, 4), torch.zeros(2, 5, 4)
    gradient[:, 0] = 1
    assert torch.equal(GradSkip._start(tokens, gradient), torch.eye(5)[:1].expand(2, 5))


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": 0},
        {"alpha": 1},
        {"flow": "absolute"},
        {"gate": "token"},
        {"embedding_norm": False},
        {"rescale": False},
    ],
)
def test_every_option_changes_the_map(options: dict) -> None:
    classifier = build("cls")
    images = pictures(classifier)
    default = {"alpha": 0.5, "flow": "positive", "gate": "block"}
    base = GradSkip(classifier, **default).attribute(images, 1)
    other = GradSkip(classifier, **default | options).attribute(images, 1)
    assert (base >= 0).all() and (other >= 0).all() and not torch.allclose(base, other, rtol=1e-3)


def test_options_are_checked() -> None:
    for options in ({"alpha": 2}, {"threshold": -1}, {"flow": "x"}, {"gate": "x"}, {"upsample": "x"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            GradSkip(build("cls"), **options)


@pytest.mark.parametrize("key", ["cls", "attention_pool", "deit3", "registers", "eva02", "dinov3", "beit", "siglip"])
def test_completeness(key: str) -> None:
    """Σ x⊙∂f/∂x + Σ b⊙∂f/∂b = f(x) over everything that is added: biases, embeddings, tokens, norm shifts."""
    classifier = build(key, double=True)
    images = classifier.normalize(pictures(classifier, 1, double=True))
    added = {
        n: p for n, p in classifier.model.named_parameters()
        if (n.endswith("bias") or n.endswith(("q_bias", "v_bias")) or "pos_embed" in n or n.endswith("token"))
        and "attn_pool.latent" not in n
    }  # fmt: skip
    for complete, close in ((True, True), (False, False)):
        x = images.clone().requires_grad_(True)
        for parameter in added.values():
            parameter.requires_grad_(True)
        context = complete_gradients(classifier.model) if complete else contextlib.nullcontext()
        with context, capture_attention(classifier, "test", detach=complete):
            # The capture cuts the graph at the first block's input, so it is restored by hand here.
            first = next(iter(classifier.model.blocks))
            first._forward_pre_hooks.popitem()
            logit = classifier.model(x)[0, 3]
        assert torch.allclose(logit, classifier.model(images)[0, 3])
        inputs = [x, *added.values()]
        grads = torch.autograd.grad(logit, inputs, allow_unused=True)
        total = sum((i * g).sum() for i, g in zip(inputs, grads, strict=True) if g is not None)
        error = float(((total - logit).abs() / logit.abs()).detach())
        assert (error <= 1e-6) is close, error
    for parameter in added.values():
        parameter.requires_grad_(False)


def test_a_segmentation_model_by_a_mask() -> None:
    trunk = build("pvt").model

    class Segmenter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = trunk
            self.head = nn.Conv2d(32, 5, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.trunk.forward_features(x))

    torch.manual_seed(0)
    scores = MaskedLogits(Segmenter())
    classifier = FrozenClassifier(
        scores, mean=(0.5,) * 3, std=(0.5,) * 3, image_size=64, feature_layers=["model.head"], copy_model=False
    )
    images = pictures(classifier)
    mask = torch.zeros(2, 1, 64, 64, dtype=torch.bool)
    mask[..., :32] = True
    explainer = GradSkip(classifier)
    whole = explainer.attribute(images, 2)
    with scores.over(mask):
        left = explainer.attribute(images, 2)
        pixel_sum = trunk_logits(scores, classifier, images)[:, :, :, :1].sum((-2, -1))  # the mask's half of a 2×2 grid
        assert torch.allclose(classifier(images), pixel_sum, atol=1e-5)
    with scores.over(~mask):
        right = explainer.attribute(images, 2)
    assert left[..., :32].sum() > right[..., :32].sum() and left[..., 32:].sum() < right[..., 32:].sum()
    assert torch.equal(explainer.attribute(images, 2), whole)


def trunk_logits(scores: MaskedLogits, classifier: FrozenClassifier, images: torch.Tensor) -> torch.Tensor:
    return scores.model(classifier.normalize(images))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("test_convnext", "no transformer blocks"),
        ("xcit_nano_12_p16_224", "no rule carries relevance"),
        ("mobilevit_xxs", "no rule carries relevance"),
    ],
)
def test_what_it_cant_serve_is_said_once(name: str, says: str) -> None:
    classifier = FrozenClassifier.from_timm(name, pretrained=False)
    with pytest.raises(ValueError, match=says) as caught:
        GradSkip(classifier).attribute(torch.rand(1, 3, *classifier.image_size))
    assert f"GradSkip can't explain {name}" in str(caught.value) and "rise" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("rescale", [False, True])
def test_cost_on_vit_base(rescale: bool) -> None:
    classifier = FrozenClassifier.from_timm("vit_base_patch16_224", pretrained=False)
    image = torch.rand(1, 3, 224, 224)
    for block in classifier.model.blocks:
        block.attn.fused_attn = False
    with FlopCounterMode(display=False) as plain:
        pixels = image.clone().requires_grad_(True)
        torch.autograd.grad(classifier.forward(pixels)[0, 0], pixels)
    with FlopCounterMode(display=False) as ours:
        GradSkip(classifier, rescale=rescale).attribute(image)
    ratio = ours.get_total_flops() / plain.get_total_flops()
    assert ratio <= 1.03
    assert rescale or (ratio >= 0.97 and 65e9 < ours.get_total_flops() < 75e9)
