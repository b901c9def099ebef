"""Soft scores: chunked gradients against plain autograd."""

from __future__ import annotations

import copy

import pytest
import torch

from aha.perturbation import make_reference, region_masks_to_pixels, soft_scores

GRID, SIZE = 4, (24, 36)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(2)
    images = torch.rand(3, 3, *SIZE, generator=generator, dtype=torch.float64)
    masks = torch.rand(3, 5, GRID * GRID, generator=generator, dtype=torch.float64)
    return images, make_reference(images, "blur"), masks


def plain(classifier, images, reference, masks, targets, shift=(0, 0)):
    """The same by a loop over samples and fractions, everything in one autograd graph."""
    rows = []
    for image, fill, mask, target in zip(images, reference, masks, targets.view(len(images), -1), strict=True):
        row = []
        for one in mask:
            m = region_masks_to_pixels(one[None, None], GRID, SIZE, shift=shift)[0, 0]
            probabilities = classifier(((1 - m) * image + m * fill)[None]).softmax(-1)[0]
            row.append(torch.stack([probabilities[t] for t in target.tolist()]).mean())
        rows.append(torch.stack(row))
    return torch.stack(rows)


@pytest.mark.parametrize("chunk_size", [1, 3, 1000])
@pytest.mark.parametrize("targets", [torch.tensor([0, 3, 4]), torch.tensor([[0, 1], [2, 2], [4, 0]])])
@pytest.mark.parametrize("shift", [(0, 0), (2, -1)])
def test_scores_and_gradient_are_those_of_one_graph(small_cnn, batch, chunk_size, targets, shift):
    images, reference, masks = batch
    weight = torch.randn(3, 5, dtype=torch.float64)
    expected_masks = masks.clone().requires_grad_()
    expected = plain(small_cnn, images, reference, expected_masks, targets, shift)
    (expected * weight).sum().backward()
    masks = masks.clone().requires_grad_()
    scores = soft_scores(small_cnn, images, reference, masks, targets, grid=GRID, shift=shift, chunk_size=chunk_size)
    (scores * weight).sum().backward()
    torch.testing.assert_close(scores, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(masks.grad, expected_masks.grad, rtol=1e-10, atol=1e-15)
    assert masks.grad.abs().sum() > 0
    assert all(p.grad is None for p in small_cnn.parameters())


def test_gradient_through_what_made_the_masks(small_cnn, batch):
    images, reference, masks = (part[:2] for part in batch)
    logits = masks[:, :1].logit().requires_grad_()
    targets = torch.tensor([0, 3])

    def score(x):
        both = torch.cat([x.sigmoid(), 1 - x.sigmoid()], 1)
        return soft_scores(small_cnn, images, reference, both, targets, grid=GRID, chunk_size=3).mean()

    assert torch.autograd.gradcheck(score, (logits,))


def test_one_chunk_of_memory(small_cnn, batch):
    """Between forward and backward only one number per mask entry is kept, whatever the number of fractions."""
    images, reference, masks = batch
    sizes = []
    handle = small_cnn.model.register_forward_pre_hook(lambda _m, inputs: sizes.append(len(inputs[0])))
    try:
        for count in (5, 20):
            many = masks[:, :1].repeat(1, count, 1).requires_grad_()
            scores = soft_scores(small_cnn, images, reference, many, torch.tensor([1, 1, 1]), grid=GRID, chunk_size=4)
            function = scores.grad_fn.next_functions[0][0]
            assert [tuple(t.shape) for t in function.saved_tensors] == [(3 * count, GRID * GRID)]
            assert function.saved_tensors[0].grad_fn is None
    finally:
        handle.remove()
    assert max(sizes) == 4
    assert sum(sizes) == 3 * 25


def test_no_gradient_asked_for(small_cnn, batch, monkeypatch):
    images, reference, masks = batch
    targets = torch.tensor([0, 3, 4])
    expected = plain(small_cnn, images, reference, masks, targets)
    monkeypatch.setattr(torch.autograd, "grad", None)  # nothing is differentiated
    scores = soft_scores(small_cnn, images, reference, masks, targets, grid=GRID, chunk_size=4)
    assert not scores.requires_grad
    torch.testing.assert_close(scores, expected)
    needy = masks.clone().requires_grad_()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            scores = soft_scores(small_cnn, images, reference, needy, targets, grid=GRID, chunk_size=4)
        assert not scores.requires_grad
        torch.testing.assert_close(scores.clone(), expected)


def test_second_derivatives_are_refused(small_cnn, batch):
    images, reference, masks = batch
    masks = masks.clone().requires_grad_()
    scores = soft_scores(small_cnn, images, reference, masks, torch.tensor([0, 0, 0]), grid=GRID)
    (first,) = torch.autograd.grad((scores**2).sum(), masks, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("reference", ["black", "mean"])
def test_bfloat16_autocast(vit, reference):
    images = torch.rand(2, 3, 64, 96)
    fill = make_reference(images, reference)
    targets = torch.tensor([1, 5])
    results = []
    for enabled in (False, True):
        masks = torch.rand(2, 4, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            scores = soft_scores(vit, images, fill, masks, targets, grid=4, chunk_size=3)
        scores.sum().backward()
        assert scores.dtype == masks.grad.dtype == torch.float32
        assert masks.grad.isfinite().all()
        results.append((scores.detach(), masks.grad))
    torch.testing.assert_close(results[1][0], results[0][0], atol=0.02, rtol=0.1)
    cosine = torch.cosine_similarity(results[0][1].flatten(), results[1][1].flatten(), dim=0)
    assert cosine > 0.95


def test_masks_of_a_bfloat16_sort_and_an_untouched_classifier(vit):
    before = copy.deepcopy(vit.state_dict())
    images = torch.rand(1, 3, 64, 96)
    masks = torch.rand(1, 2, 16).bfloat16().requires_grad_()
    soft_scores(vit, images, torch.zeros_like(images), masks, torch.tensor([0]), grid=4).sum().backward()
    assert masks.grad.dtype == torch.bfloat16
    assert all(torch.equal(before[k], v) for k, v in vit.state_dict().items())
    assert not any(m.training or m._forward_hooks for m in vit.modules())


def test_hard_masks_give_the_ends(small_cnn, batch):
    images, reference, _ = batch
    targets = torch.tensor([0, 3, 4])
    masks = torch.stack([torch.zeros(3, GRID * GRID), torch.ones(3, GRID * GRID)], 1).double()
    scores = soft_scores(small_cnn, images, reference, masks, targets, grid=GRID)
    for column, pictures in ((0, images), (1, reference)):
        expected = small_cnn.target_probability(small_cnn(pictures), targets)
        torch.testing.assert_close(scores[:, column], expected)
