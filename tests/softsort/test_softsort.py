"""Every relaxation against a float64 loop version of its formula, and the properties that masks must have."""

from __future__ import annotations

import doctest
import math

import pytest
import torch

import aha.softsort
from aha.softsort import METHODS, hard_prefix_masks, marginal_residual, prefix_masks, soft_to_hard_gap

ALL = list(METHODS)
FRACTIONS = {
    "end points": [0.0, 0.25, 0.5, 0.75, 1.0],
    "inner": [0.1, 0.37, 0.8],
    "repeats": [0.0, 0.0, 0.4, 0.4, 0.9],
    "one": [0.55],
}


def random_scores(batch: int, regions: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(batch, regions, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# ---- slow references: one sample, plain floats ----


def logsumexp(values: list[float]) -> float:
    top = max(values)
    return top + math.log(sum(math.exp(v - top) for v in values))


def cut(matrix: list[list[float]], fractions: list[float]) -> list[list[float]]:
    """(1 − α)·C_m + α·C_{m+1} from an n × n matrix with ranks as rows."""
    n = len(matrix)
    cumulative = [[0.0] * n]
    for row in matrix:
        cumulative.append([c + r for c, r in zip(cumulative[-1], row, strict=True)])
    masks = []
    for p in fractions:
        m = min(math.floor(p * n), n - 1)
        alpha = p * n - m
        masks.append([(1 - alpha) * a + alpha * b for a, b in zip(cumulative[m], cumulative[m + 1], strict=True)])
    return masks


def slow_gumbel_sinkhorn(scores, fractions, temperature, iterations=30):
    n = len(scores)
    anchors = [1 - k / (n - 1) for k in range(n)]
    log = [[-((s - a) ** 2) / temperature for s in scores] for a in anchors]
    for _ in range(iterations):
        for i in range(n):
            total = logsumexp([log[k][i] for k in range(n)])
            for k in range(n):
                log[k][i] -= total
        for k in range(n):
            total = logsumexp(log[k])
            log[k] = [v - total for v in log[k]]
    return cut([[math.exp(v) for v in row] for row in log], fractions)


def slow_quantile_sinkhorn(scores, fractions, temperature, iterations=3000):
    n = len(scores)
    ends = [0.0, *fractions, 1.0]
    bins = [(low, high) for low, high in zip(ends, ends[1:], strict=False) if high > low]
    log = [[2 * s * (1 - (low + high) / 2) / temperature for s in scores] for low, high in bins]
    for _ in range(iterations):
        for b, (low, high) in enumerate(bins):
            change = math.log(high - low) - logsumexp(log[b])
            log[b] = [v + change for v in log[b]]
        for i in range(n):
            change = math.log(1 / n) - logsumexp([row[i] for row in log])
            for row in log:
                row[i] += change
    plan = [[math.exp(v) for v in row] for row in log]
    return [
        [n * sum(row[i] for row, (_, high) in zip(plan, bins, strict=True) if high <= p) for i in range(n)]
        for p in fractions
    ]


def slow_lapsum(scores, fractions, temperature):
    def distribution(x):
        return 0.5 * math.exp(x) if x < 0 else 1 - 0.5 * math.exp(-x)

    masks = []
    for p in fractions:
        if p in (0.0, 1.0):
            masks.append([p] * len(scores))
            continue
        low, high = min(scores) - 60 * temperature, max(scores) + 60 * temperature
        for _ in range(200):
            middle = (low + high) / 2
            if sum(distribution((s - middle) / temperature) for s in scores) > p * len(scores):
                low = middle
            else:
                high = middle
        masks.append([distribution((s - low) / temperature) for s in scores])
    return masks


def slow_softsort(scores, fractions, temperature, iterations=10):
    n = len(scores)
    matrix = []
    for top in sorted(scores, reverse=True):
        row = [math.exp(-abs(top - s) / temperature) for s in scores]
        matrix.append([v / sum(row) for v in row])
    for step in range(iterations):
        if step > 0:
            matrix = [[v / sum(row) for v in row] for row in matrix]
        totals = [sum(row[i] for row in matrix) for i in range(n)]
        matrix = [[v / t for v, t in zip(row, totals, strict=True)] for row in matrix]
    return [[min(max(v, 0.0), 1.0) for v in mask] for mask in cut(matrix, fractions)]


SLOW = {
    "gumbel_sinkhorn": slow_gumbel_sinkhorn,
    "quantile_sinkhorn": slow_quantile_sinkhorn,
    "lapsum": slow_lapsum,
    "softsort": slow_softsort,
}


@pytest.mark.parametrize("fractions", FRACTIONS.values(), ids=FRACTIONS)
@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_equals_slow_version(method, fractions, temperature):
    scores = random_scores(2, 9)
    expected = torch.tensor([SLOW[method](row.tolist(), fractions, temperature) for row in scores], dtype=torch.float64)
    # 15: the loops run to full convergence, the default stops at float32's.
    iterations = 15 if method == "quantile_sinkhorn" else None
    masks = prefix_masks(scores, fractions, method=method, temperature=temperature, iterations=iterations)
    tolerance = 1e-3 if method == "gumbel_sinkhorn" else 1e-8
    inner = torch.tensor([0 < p < 1 for p in fractions])
    torch.testing.assert_close(masks[:, inner], expected[:, inner], atol=1e-8, rtol=0)
    # The published p = 1 mask is 1 only at convergence; here it is exact.
    torch.testing.assert_close(masks, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("iterations", [0, 1, 3])
def test_softsort_and_gumbel_iterations_equal_slow_version(iterations):
    scores = random_scores(1, 8, seed=3)
    for method in ("softsort", "gumbel_sinkhorn") if iterations else ("softsort",):
        masks = prefix_masks(scores, [0.3, 0.7], method=method, temperature=0.5, iterations=iterations)
        expected = SLOW[method](scores[0].tolist(), [0.3, 0.7], 0.5, iterations)
        torch.testing.assert_close(
            masks[0], torch.tensor(expected, dtype=torch.float64).clamp(0, 1), atol=1e-10, rtol=0
        )


def test_quantile_sinkhorn_with_a_bin_per_region_is_the_published_sort():
    scores, n = random_scores(2, 12), 12
    fractions = torch.arange(n + 1, dtype=torch.float64) / n
    published = prefix_masks(scores, fractions, method="gumbel_sinkhorn", temperature=0.5, iterations=2000)
    binned = prefix_masks(scores, fractions, temperature=0.5 * (n - 1) / n, iterations=15)
    torch.testing.assert_close(binned, published, atol=1e-9, rtol=0)


# ---- what masks must be ----


@pytest.mark.parametrize("fractions", FRACTIONS.values(), ids=FRACTIONS)
@pytest.mark.parametrize("method", ["quantile_sinkhorn", "lapsum", "softsort"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hard_limit(method, fractions, dtype):
    order = torch.stack([torch.randperm(21, generator=torch.Generator().manual_seed(seed)) for seed in range(3)])
    scores = order.to(dtype) / 7 - 1
    temperature = 1e-4 if method == "quantile_sinkhorn" else 1e-3
    masks = prefix_masks(scores, fractions, method=method, temperature=temperature)
    torch.testing.assert_close(masks, hard_prefix_masks(scores, fractions), atol=1e-4, rtol=0)
    assert soft_to_hard_gap(masks, scores, fractions) < 1e-4


def test_gumbel_sinkhorn_hard_limit():
    # Scores that match the anchors; others need ever more iterations as τ falls.
    scores = torch.tensor([[2.0, 0.0, 3.0, 1.0]], dtype=torch.float64) / 3
    masks = prefix_masks(scores, [0.25, 0.5, 0.8], method="gumbel_sinkhorn", temperature=0.005)
    torch.testing.assert_close(masks, hard_prefix_masks(scores, [0.25, 0.5, 0.8]), atol=1e-4, rtol=0)


def test_hard_prefix_masks_by_hand():
    masks = hard_prefix_masks(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), [0.0, 0.25, 0.6, 1.0])
    expected = [[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0.4], [1, 1, 1, 1]]
    torch.testing.assert_close(masks, torch.tensor([expected]))


@pytest.mark.parametrize("fractions", FRACTIONS.values(), ids=FRACTIONS)
@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("temperature", [1.0, 0.1, 0.003])
def test_masks_are_masks(method, fractions, temperature):
    scores = random_scores(3, 64, dtype=torch.float32)
    masks = prefix_masks(scores, fractions, method=method, temperature=temperature)
    assert masks.shape == (3, len(fractions), 64) and masks.dtype == torch.float32
    assert masks.min() >= 0 and masks.max() <= 1
    assert (masks[:, 1:] >= masks[:, :-1] - 1e-6).all()
    for index, p in enumerate(fractions):
        if p in (0.0, 1.0):
            assert (masks[:, index] == p).all()
    limit = {"quantile_sinkhorn": 2e-6, "lapsum": 2e-6, "softsort": 1e-2, "gumbel_sinkhorn": 1.0}[method]
    if method == "gumbel_sinkhorn" and temperature == 1.0:
        limit = 1e-4
    assert marginal_residual(masks, fractions) < limit
    if method == "gumbel_sinkhorn" and temperature < 0.1:
        return  # far from convergence: the clamp at 1 reorders columns whose sums differ
    # Higher scores are in first: masks rank as scores do.
    ordered = masks.gather(2, scores.argsort(dim=1, descending=True)[:, None].expand_as(masks))
    assert (ordered[..., 1:] <= ordered[..., :-1] + 1e-5).all()


@pytest.mark.parametrize("regions", [1, 2, 5, 784])
@pytest.mark.parametrize("method", ["quantile_sinkhorn", "lapsum"])
def test_marginals_hold_for_random_strata_and_any_tail(method, regions):
    generator = torch.Generator().manual_seed(regions)
    for count in (1, 4, 16):
        strata = (torch.arange(count) + torch.rand(count, generator=generator)) / count
        for power in (1, 3):
            scores = torch.randn(4, regions, generator=generator) ** power
            for temperature in (3.0, 0.1, 0.003):
                masks = prefix_masks(scores, strata, method=method, temperature=temperature)
                assert marginal_residual(masks, strata) < 2e-5


@pytest.mark.parametrize("method", ["quantile_sinkhorn", "lapsum"])
@pytest.mark.parametrize("temperature", [1.0, 0.1, 0.003])
def test_ties(method, temperature):
    scores = (random_scores(4, 100, dtype=torch.float32) * 2).round().clamp(min=0).requires_grad_()
    fractions = [0.05, 0.1, 0.3, 0.62, 0.9]
    masks = prefix_masks(scores, fractions, method=method, temperature=temperature)
    assert marginal_residual(masks, fractions) < 1e-5
    for row, mask in zip(scores.detach(), masks.detach(), strict=True):
        for value in row.unique():
            tied = mask[:, row == value]
            torch.testing.assert_close(tied, tied[:, :1].expand_as(tied), atol=1e-6, rtol=0)
    masks.square().sum().backward()
    assert scores.grad.isfinite().all()


@pytest.mark.parametrize("method", ALL)
def test_constant_scores_give_uniform_masks(method):
    scores = torch.full((2, 30), 7.0, requires_grad=True)
    fractions = [0.0, 0.2, 0.5, 1.0]
    masks = prefix_masks(scores, fractions, method=method)
    torch.testing.assert_close(masks, torch.tensor(fractions)[None, :, None].expand(2, 4, 30), atol=1e-5, rtol=0)
    masks.square().sum().backward()
    assert scores.grad.isfinite().all()


@pytest.mark.parametrize("method", ALL)
def test_permutation_equivariance(method):
    scores, order = random_scores(2, 20), torch.randperm(20, generator=torch.Generator().manual_seed(1))
    masks = prefix_masks(scores, [0.2, 0.5, 0.9], method=method)
    permuted = prefix_masks(scores[:, order], [0.2, 0.5, 0.9], method=method)
    torch.testing.assert_close(permuted, masks[:, :, order], atol=1e-9, rtol=0)


@pytest.mark.parametrize("method", ALL)
def test_shift_invariance(method):
    scores = random_scores(2, 20)
    # The published sort reaches it at convergence only: its first normalisations see −a².
    options = {"temperature": 1.0, "iterations": 500} if method == "gumbel_sinkhorn" else {}
    masks = prefix_masks(scores, [0.2, 0.5, 0.9], method=method, **options)
    shifted = prefix_masks(scores + 2.5, [0.2, 0.5, 0.9], method=method, **options)
    torch.testing.assert_close(shifted, masks, atol=1e-7, rtol=0)


@pytest.mark.parametrize("method", ALL)
def test_negated_scores_give_the_complement(method):
    scores, fractions = (
        random_scores(2, 20),
        torch.tensor([0.0, 0.15, 0.5, 0.6, 0.95, 1.0], dtype=torch.float64),
    )
    options = {"temperature": 1.0, "iterations": 500} if method == "gumbel_sinkhorn" else {}
    masks = prefix_masks(scores, fractions, method=method, **options)
    negated = prefix_masks(-scores, (1 - fractions).flip(0), method=method, **options)
    torch.testing.assert_close(negated, 1 - masks.flip(1), atol=1e-7, rtol=0)


@pytest.mark.parametrize("method", ALL)
def test_samples_do_not_touch_each_other(method):
    scores = random_scores(4, 25, dtype=torch.float32)
    masks = prefix_masks(scores, [0.0, 0.3, 0.7, 1.0], method=method)
    alone = torch.cat([prefix_masks(row[None], [0.0, 0.3, 0.7, 1.0], method=method) for row in scores])
    torch.testing.assert_close(masks, alone, atol=1e-6, rtol=0)
    for value in (math.nan, math.inf):
        broken = scores.clone()
        broken[1, 3] = value
        found = prefix_masks(broken, [0.0, 0.3, 0.7, 1.0], method=method)
        torch.testing.assert_close(found[[0, 2, 3]], masks[[0, 2, 3]], atol=1e-6, rtol=0)
        assert found[1, 1:3].isnan().any() and (found[1, 0] == 0).all() and (found[1, 3] == 1).all()


@pytest.mark.parametrize("method", ALL)
def test_precision(method):
    scores = random_scores(2, 30, dtype=torch.bfloat16).requires_grad_()
    masks = prefix_masks(scores, [0.2, 0.6], method=method)
    assert masks.dtype == torch.float32
    masks.square().sum().backward()
    assert scores.grad.dtype == torch.bfloat16 and scores.grad.isfinite().all()
    full = scores.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = prefix_masks(full, [0.2, 0.6], method=method)
        under_autocast.square().sum().backward()
    torch.testing.assert_close(under_autocast, masks.detach(), atol=0, rtol=0)
    torch.testing.assert_close(full.grad, scores.grad.float(), atol=0.01, rtol=0.02)
    exact = prefix_masks(full.detach().double(), [0.2, 0.6], method=method)
    torch.testing.assert_close(masks.double(), exact, atol=1e-4, rtol=0)
    half = prefix_masks(full.detach().half(), [0.2, 0.6], method=method)
    assert half.dtype == torch.float32 and half.isfinite().all()


@pytest.mark.parametrize("method", ALL)
def test_noise(method):
    scores = random_scores(2, 15, dtype=torch.float32)

    def draw(seed, noise=0.5):
        generator = torch.Generator().manual_seed(seed)
        return prefix_masks(scores, [0.3, 0.7], method=method, noise=noise, generator=generator)

    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))
    assert torch.equal(draw(0, noise=0.0), draw(1, noise=0.0))
    state = torch.get_rng_state()
    draw(0)
    assert torch.equal(state, torch.get_rng_state())


def test_noise_scale():
    shift = -torch.empty(1, 500).exponential_(generator=torch.Generator().manual_seed(0)).log()
    scores = random_scores(1, 500, dtype=torch.float32)
    noisy = prefix_masks(scores, [0.5], noise=2.0, temperature=0.3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(noisy, prefix_masks(scores + 0.6 * shift, [0.5], temperature=0.3), atol=1e-5, rtol=0)


# ---- gradients ----


@pytest.mark.parametrize("fractions", FRACTIONS.values(), ids=FRACTIONS)
@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_gradcheck(method, fractions, temperature):
    scores = random_scores(2, 7, seed=2).requires_grad_()
    iterations = 15 if method == "quantile_sinkhorn" else None

    def masks(x):
        return prefix_masks(x, fractions, method=method, temperature=temperature, iterations=iterations)

    assert torch.autograd.gradcheck(masks, scores, eps=1e-6, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("method", ["quantile_sinkhorn", "lapsum"])
@pytest.mark.parametrize("temperature", [1.0, 0.1, 0.02])
def test_default_gradient_in_float32_is_the_converged_one(method, temperature):
    scores, fractions = random_scores(2, 196, seed=4), torch.linspace(0, 1, 16)
    weights = random_scores(2, 16 * 196, seed=5).view(2, 16, 196)
    gradients = []
    for x, iterations in ((scores.float(), None), (scores, 30 if method == "quantile_sinkhorn" else None)):
        x = x.clone().requires_grad_()
        masks = prefix_masks(x, fractions, method=method, temperature=temperature, iterations=iterations)
        (masks * weights.to(masks)).sum().backward()
        gradients.append(x.grad.double())
    assert (gradients[0] - gradients[1]).norm() < 1e-4 * gradients[1].norm()
    # Shift-invariant masks: the gradient sums to zero.
    assert gradients[0].sum(dim=1).abs().max() < 1e-4 * gradients[0].abs().sum(dim=1).max()


@pytest.mark.parametrize("method", ALL)
def test_gradient_stays_finite_when_hard(method):
    scores = random_scores(2, 50, dtype=torch.float32).requires_grad_()
    prefix_masks(scores, [0.0, 0.1, 0.5, 0.9, 1.0], method=method, temperature=1e-4).square().sum().backward()
    assert scores.grad.isfinite().all()


# ---- the door ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": torch.zeros(5)}, "shape"),
        ({"scores": torch.zeros(2, 0)}, "shape"),
        ({"scores": torch.zeros(2, 5, dtype=torch.long)}, "floating point"),
        ({"fractions": [0.5, 0.2]}, "must not decrease"),
        ({"fractions": [0.5, 1.2]}, r"lie in \[0, 1\]"),
        ({"fractions": [-0.1, 0.5]}, r"lie in \[0, 1\]"),
        ({"fractions": [math.nan]}, r"lie in \[0, 1\]"),
        ({"fractions": []}, "K of at least 1"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"temperature": math.nan}, "temperature must be positive"),
        ({"noise": -1.0}, "noise must be"),
        ({"iterations": -1}, "iterations"),
        ({"method": "neuralsort"}, "unknown soft sort 'neuralsort'; choose one of quantile_sinkhorn"),
        ({"method": "lapsum", "iterations": 3}, "closed form"),
    ],
)
def test_bad_input(change, message):
    arguments = {"scores": torch.zeros(2, 5), "fractions": [0.2, 0.5], **change}
    with pytest.raises(ValueError, match=message):
        prefix_masks(**arguments)


def test_doctest():
    results = doctest.testmod(aha.softsort, extraglobs={"torch": torch})
    assert results.attempted > 0 and results.failed == 0
