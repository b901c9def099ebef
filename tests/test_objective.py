"""The objective against the published algorithm, written out in loops and float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import aha
from aha.objective import AHAObjective, Draw

SIZE = (20, 16)


@pytest.fixture(scope="module")
def classifier() -> aha.FrozenClassifier:
    """A smooth little network in float64, so that finite differences are sharp."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 6, 3, padding=1),
        torch.nn.Tanh(),
        torch.nn.AdaptiveAvgPool2d(3),
        torch.nn.Flatten(),
        torch.nn.Linear(54, 5),
    )
    for parameter in net.parameters():
        parameter.data *= 3
    return aha.FrozenClassifier(net, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25), image_size=SIZE).double()


def gaussian(taps: int, sigma: float) -> list[float]:
    weights = [math.exp(-((i - taps // 2) ** 2) / (2 * sigma**2)) for i in range(taps)]
    return [w / sum(weights) for w in weights]


def blur_by_loops(image: Tensor, taps: int, sigma: float) -> Tensor:
    kernel, reach = gaussian(taps, sigma), taps // 2
    for axis in (-1, -2):
        side = image.shape[axis]
        out = torch.zeros_like(image)
        for i in range(side):
            for k, w in enumerate(kernel):
                j = i + k - reach
                j = -j if j < 0 else 2 * (side - 1) - j if j >= side else j
                out.select(axis, i).add_(w * image.select(axis, j))
        image = out
    return image


def sinkhorn_by_formula(scores: Tensor, temperature: float, iterations: int) -> Tensor:
    """(n, n) with row k = rank: log α[k, i] = −(s_i − a_k)², divided by τ, normalised in turn over k and over i."""
    n = len(scores)
    logits = torch.stack(
        [torch.stack([-((scores[i] - (1 - k / (n - 1))) ** 2) / temperature for i in range(n)]) for k in range(n)]
    )
    for _ in range(iterations):
        logits = logits - torch.logsumexp(logits, 0, keepdim=True)
        logits = logits - torch.logsumexp(logits, 1, keepdim=True)
    return logits.exp()


def mask_by_formula(ranking: Tensor, p: float) -> Tensor:
    n = len(ranking)
    whole, rest = int(math.floor(p * n)), p * n - math.floor(p * n)
    mask = sum((ranking[k] for k in range(whole)), torch.zeros(n, dtype=ranking.dtype))
    return mask + rest * ranking[whole] if rest > 0 else mask


def published_loss(classifier, image, amap, targets, grid, temperature, reference, points, iterations=30) -> Tensor:
    """One sample, as the paper's code does it: two sorts, end points included, every image forwarded."""
    height, width = image.shape[-2:]
    scores = []
    for r in range(grid):
        for c in range(grid):
            rows = slice(r * height // grid, -(-(r + 1) * height // grid))
            columns = slice(c * width // grid, -(-(c + 1) * width // grid))
            scores.append(amap[rows, columns].mean())
    scores = torch.stack(scores)
    areas = []
    for sign in (1, -1):
        ranking = sinkhorn_by_formula(sign * scores, temperature, iterations)
        values = []
        for j in range(points):
            mask = mask_by_formula(ranking, j / (points - 1)).view(grid, grid)
            full = torch.stack(
                [
                    torch.stack([mask[y * grid // height, x * grid // width] for x in range(width)])
                    for y in range(height)
                ]
            )
            full = blur_by_loops(full, 7, 1.0)
            perturbed = (1 - full) * image + full * reference
            values.append(classifier(perturbed[None]).softmax(-1)[0, targets].mean())
        step = 1 / (points - 1)
        areas.append(sum((a + b) / 2 * step for a, b in zip(values, values[1:], strict=False)))
    deletion, least_first = areas
    # Deleting the least important first, read backwards, is insertion: the area is the same.
    return deletion + (1 - least_first)


def make(**options) -> AHAObjective:
    defaults = dict(
        noise=0.0, num_fractions=5, fraction_sampling="linspace", smoothness_weight=0.0, min_grid=2, max_grid=4
    )
    return AHAObjective(**defaults | options)


@pytest.mark.parametrize("targets", [[1], [1, 3]])
def test_equals_the_published_algorithm(classifier, targets: list[int], monkeypatch) -> None:
    torch.manual_seed(1)
    images = torch.rand(2, 3, *SIZE, dtype=torch.float64)
    maps = torch.randn(2, 1, *SIZE, dtype=torch.float64)
    objective = make(method="gumbel_sinkhorn", standardize_scores=False, chunk_size=3)
    draw = Draw(3, (0, 0), "black", torch.linspace(0, 1, 5))
    terms = objective(classifier, images, maps, torch.tensor(targets).expand(2, -1), draw, temperature=0.5)
    expected = torch.stack(
        [
            published_loss(classifier, x, a[0], targets, 3, 0.5, torch.zeros_like(x), 5)
            for x, a in zip(images, maps, strict=True)
        ]
    )
    torch.testing.assert_close(terms.per_sample.double(), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("method", ["quantile_sinkhorn", "lapsum", "softsort"])
def test_gradient_by_finite_differences(classifier, method: str) -> None:
    torch.manual_seed(2)
    images = torch.rand(1, 3, *SIZE, dtype=torch.float64)
    maps = torch.randn(1, 1, *SIZE, dtype=torch.float64, requires_grad=True)
    objective = make(method=method, smoothness_weight=0.3)
    draw = Draw(4, (1, -1), "mean", torch.linspace(0, 1, 5))

    def loss(m: Tensor) -> Tensor:
        return objective(classifier, images, m, torch.tensor([2]), draw, temperature=0.7).per_sample.sum()

    (gradient,) = torch.autograd.grad(loss(maps), maps)
    direction = torch.randn_like(maps)
    step = 2e-3  # the objective works in float32 throughout
    numeric = (loss(maps.detach() + step * direction) - loss(maps.detach() - step * direction)) / (2 * step)
    assert float((gradient * direction).sum()) == pytest.approx(float(numeric), rel=2e-2, abs=2e-4)


def test_smoothness_by_loops() -> None:
    torch.manual_seed(3)
    maps = torch.randn(2, 1, 9, 12)
    objective = make(smoothness_window=5, standardize_scores=False)
    padded = F.pad(maps, (2, 2, 2, 2), mode="reflect")
    expected = []
    for b in range(2):
        total = 0.0
        for y in range(9):
            for x in range(12):
                local = padded[b, 0, y : y + 5, x : x + 5].mean()
                total += max(float(maps[b, 0, y, x] - local), 0.0) ** 2
        expected.append(total / (9 * 12))
    torch.testing.assert_close(objective.smoothness(maps), torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_isolated_peaks_are_rougher_than_a_plateau() -> None:
    peak, plateau = torch.zeros(1, 1, 16, 16), torch.zeros(1, 1, 16, 16)
    peak[..., 8, 8] = 1
    plateau[..., :, 8:] = 1
    objective = make(smoothness_window=5)
    assert objective.smoothness(peak) > 2 * objective.smoothness(plateau)


def test_chunk_size_and_scale_change_nothing(classifier) -> None:
    torch.manual_seed(4)
    images, maps = torch.rand(3, 3, *SIZE).double(), torch.randn(3, 1, *SIZE)
    draw = Draw(4, (0, 0), "blur", torch.linspace(0.1, 0.9, 4))
    targets = torch.tensor([0, 1, 2])
    base = make(fraction_sampling="stratified")(classifier, images, maps, targets, draw, temperature=0.2)
    chunked = make(fraction_sampling="stratified", chunk_size=2)(
        classifier, images, maps, targets, draw, temperature=0.2
    )
    scaled = make(fraction_sampling="stratified")(classifier, images, 7 * maps + 3, targets, draw, temperature=0.2)
    torch.testing.assert_close(base.per_sample, chunked.per_sample)
    torch.testing.assert_close(base.per_sample, scaled.per_sample, atol=1e-5, rtol=1e-5)


def test_stratified_fractions_estimate_the_area_without_bias(classifier) -> None:
    torch.manual_seed(5)
    images, maps = torch.rand(2, 3, *SIZE).double(), torch.randn(2, 1, *SIZE)
    targets = torch.tensor([0, 1])
    exact = make(num_fractions=201)(
        classifier, images, maps, targets, Draw(4, (0, 0), "mean", torch.linspace(0, 1, 201)), temperature=0.2
    )
    objective = make(
        fraction_sampling="stratified", num_fractions=3, min_grid=4, max_grid=4, max_shift=0.0, references=["mean"]
    )
    generator = torch.Generator().manual_seed(0)
    draws = [
        objective(classifier, images, maps, targets, objective.draw(SIZE, generator), temperature=0.2).deletion
        for _ in range(200)
    ]
    draws = torch.stack(draws)
    error = (draws.mean(0) - exact.deletion).abs()
    assert (error < 4 * draws.std(0) / 200**0.5 + 1e-4).all()


def test_draws_cover_their_ranges_and_repeat_with_the_seed() -> None:
    objective = AHAObjective(min_grid=5, max_grid=8, num_fractions=4)
    first = [objective.draw((64, 48), torch.Generator().manual_seed(s)) for s in range(200)]
    second = [objective.draw((64, 48), torch.Generator().manual_seed(s)) for s in range(200)]
    assert all(torch.equal(a.fractions, b.fractions) and a[:3] == b[:3] for a, b in zip(first, second, strict=True))
    assert {d.grid for d in first} == {5, 6, 7, 8}
    assert {d.reference for d in first} == {"black", "mean", "blur"}
    assert all(
        abs(d.shift[0]) <= round(64 // d.grid * 0.5) and abs(d.shift[1]) <= round(48 // d.grid * 0.5) for d in first
    )
    assert all((d.fractions * 4).long().tolist() == [0, 1, 2, 3] for d in first)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "bubble"}, "Unknown soft sort 'bubble'"),
        ({"min_grid": 9, "max_grid": 8}, "min_grid ≤ max_grid, got 9 and 8"),
        ({"references": ["white"]}, "Unknown references"),
        ({"smoothness_window": 4}, "odd, got 4"),
    ],
)
def test_bad_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AHAObjective(**options)
