"""Automatic chunk sizes: by cache on a CPU, by free memory on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch

from aha.perturbation import chunks


def test_on_a_cpu_the_image_size_and_the_threads_decide(vit, monkeypatch):
    sizes = [chunks.automatic_chunk_size(vit, torch.empty(1, 3, side, side)) for side in (8, 64, 224, 1024)]
    assert sizes == [256, 78, 6, 1]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert chunks.automatic_chunk_size(vit, torch.empty(1, 3, 224, 224)) == 26


def test_one_thread_runs_pointwise_convolutions_in_sixteens(small_cnn, monkeypatch):
    image, pointwise = torch.empty(1, 3, 224, 224), copy.deepcopy(small_cnn)
    pointwise.model.extra = torch.nn.Conv2d(4, 4, 1)
    for threads, sizes in ((1, [6, 16]), (2, [13, 13])):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        assert [chunks.automatic_chunk_size(model, image) for model in (small_cnn, pointwise)] == sizes


@pytest.mark.parametrize(
    ("available", "each", "expected"), [(1000, 10, 64), (1 << 40, 10, 256), (5, 10, 1), (0, 0, 1), (1280, 10, 128)]
)
def test_powers_of_two_that_fit(available, each, expected):
    assert chunks.fitting(available, each) == expected


def test_stored_bytes_are_those_of_the_activations_and_grow_with_the_batch(small_cnn):
    image = torch.rand(1, 3, 24, 36, dtype=torch.float64)
    one, three = (chunks.stored_bytes(small_cnn, image.expand(n, -1, -1, -1)) for n in (1, 3))
    # At least what the nonlinearities keep; the frozen weights are not counted.
    assert one >= 8 * (8 * 6 * 9 + 12 * 3 * 5)
    assert three == pytest.approx(3 * one, rel=0.1)
    assert all(p.grad is None and not p.requires_grad for p in small_cnn.parameters())


def test_images_are_laid_out_channels_last_without_changing_them():
    images = torch.rand(2, 3, 5, 7)
    assert torch.equal(chunks.lay_out(images), images)
    assert chunks.lay_out(images).stride(1) == 1
