"""Exported programs compute what the explainer computes, run where torch isn't, and never spoil what was there."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from trained_like import trained_like

from aha import FrozenClassifier
from aha.backbone import FrozenBackbone
from aha.export import exporters
from aha.export.exporters import export_explainer
from aha.export.graph import ExplainerGraph, at_size, trace
from aha.export.parity import ParityError, sample_pictures

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["timm"] = None  # any import of them fails
import numpy as np, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
given = np.load(sys.argv[2])
for n in (1, 3, 8):
    logits, maps = session.run(None, {"images": given["images"][:n], "targets": given["targets"][:n]})
    np.savez(f"{sys.argv[3]}-{n}.npz", logits=logits, maps=maps)
"""

FAMILIES = {
    "vit": ("test_vit", (64, 96)),
    "convnext": ("test_convnext", (64, 96)),
    "patch 14": ("vit_tiny_patch16_224", (56, 84)),  # patch_size=14: the head's finer grids don't divide the image
    "swin (NHWC)": ("swin_tiny_patch4_window7_224", (224, 224)),
    "two prefix tokens": ("deit_tiny_distilled_patch16_224", (64, 96)),
    "five prefix tokens, rotary": ("vit_small_patch16_dinov3", (64, 96)),
    "eva02": ("eva02_tiny_patch14_224", (56, 84)),
    "efficientnet": ("test_efficientnet", (64, 96)),
    "resnet": ("test_resnet", (64, 96)),
}


def build(family: str, **options):
    name, size = FAMILIES[family]
    kwargs = {"patch_size": 14} if family == "patch 14" else {}
    classifier = FrozenClassifier.from_timm(name, pretrained=False, image_size=size, num_classes=7, **kwargs)
    return trained_like(classifier, **options)


def relative(found, expected) -> float:
    found, expected = (torch.as_tensor(x).flatten(1).double() for x in (found, expected))
    return ((found - expected).abs().amax(1) / (expected.amax(1) - expected.amin(1))).max().item()


def check_onnx(explainer, tmp_path):
    """Run by onnxruntime alone, in a process that can't import torch, at batch 1, 3 and 8."""
    path = tmp_path / "explainer.onnx"
    export_explainer(explainer, path, format="onnx")
    images = sample_pictures(explainer.classifier.image_size).float() / 255
    targets = torch.tensor([-1, 0, 3, -1, 6, 5, -1, 2])
    np.savez(tmp_path / "given.npz", images=images.numpy(), targets=targets.numpy())
    command = [sys.executable, "-c", WITHOUT_TORCH, str(path), str(tmp_path / "given.npz"), str(tmp_path / "found")]
    subprocess.run(command, check=True, timeout=120)
    for n in (1, 3, 8):
        found = np.load(tmp_path / f"found-{n}.npz")
        predicted = explainer.classifier(images[:n]).argmax(-1)
        expected = explainer.explain(images[:n], torch.where(targets[:n] < 0, predicted, targets[:n]))
        assert relative(found["logits"], expected.logits) <= 1e-4
        assert relative(found["maps"], expected.maps) <= 1e-4


@pytest.mark.parametrize("family", ["vit", "convnext"])
def test_onnx(family, tmp_path):
    check_onnx(build(family), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES)[2:])
def test_onnx_families(family, tmp_path):
    check_onnx(build(family), tmp_path)


@pytest.mark.slow
def test_onnx_with_a_separate_encoder(vit, tmp_path):
    encoder = FrozenBackbone.from_timm("test_convnext", pretrained=False, image_size=(96, 64), num_classes=0)
    check_onnx(trained_like(vit, encoder=encoder), tmp_path)


@pytest.mark.parametrize(
    "family", ["vit", "convnext", *(pytest.param(f, marks=pytest.mark.slow) for f in list(FAMILIES)[2:])]
)
def test_pt2(family, tmp_path):
    explainer = build(family)
    export_explainer(explainer, tmp_path / "explainer.pt2", format="pt2")
    graph = torch.export.load(tmp_path / "explainer.pt2").module()
    images = sample_pictures(explainer.classifier.image_size).float() / 255
    for n in (1, 3, 8):
        with torch.no_grad():
            logits, maps = graph(images[:n], torch.full((n,), -1))
        expected = explainer.explain(images[:n])
        assert relative(logits, expected.logits) <= 1e-6
        assert relative(maps, expected.maps) <= 1e-6


@pytest.mark.parametrize("options", [{"class_vector": "embedding"}, {"evidence": False}, {"edges": True}])
def test_other_heads_trace(vit, options):
    explainer = trained_like(vit, **options)
    graph = trace(explainer).module()
    images = torch.rand(3, 3, 64, 96)
    targets = torch.tensor([4, -1, 2])
    with torch.no_grad():
        logits, maps = graph(images, targets)
    assert torch.equal(maps, explainer.attribute(images, torch.where(targets < 0, logits.argmax(-1), targets)))


def test_uint8_pixels(explainer, tmp_path):
    figures = export_explainer(explainer, tmp_path / "e.pt2", format="pt2", pixels="uint8")
    assert figures["pixels"] == "uint8" and figures["largest_difference"] <= 1e-6
    graph = torch.export.load(tmp_path / "e.pt2").module()
    assert graph(torch.zeros(1, 3, 64, 96, dtype=torch.uint8), torch.tensor([-1]))[1].shape == (1, 1, 64, 96)


def test_half_precision(explainer, tmp_path):
    figures = export_explainer(explainer, tmp_path / "e.pt2", format="pt2", precision="fp16")
    assert 0 < figures["largest_difference"] < 0.05
    assert next(explainer.classifier.model.parameters()).dtype == torch.float32  # the original is untouched


def test_artefact_export_checks_itself(explainer, tmp_path):
    figures = export_explainer(explainer, tmp_path / "a", format="safetensors", with_backbone=True)
    assert figures["largest_difference"] == 0.0
    assert json.loads((tmp_path / "a" / "parity.json").read_text()) == figures
    half = export_explainer(explainer, tmp_path / "b", format="safetensors", precision="fp16")
    assert 0 < half["largest_difference"] < 0.01
    size = [(tmp_path / x / "model.safetensors").stat().st_size for x in "ab"]
    assert size[1] < 0.75 * size[0]


def test_a_failed_check_leaves_what_was_there(explainer, tmp_path, monkeypatch):
    path = tmp_path / "e.pt2"
    path.write_text("old")
    monkeypatch.setitem(exporters.TOLERANCES, "pt2", -1.0)
    with pytest.raises(ParityError, match="differs from the explainer"):
        export_explainer(explainer, path, format="pt2")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["e.pt2"]


def test_parity_notices_a_wrong_graph(explainer):
    def first_class_always(images, targets):
        found = explainer.explain(images, 0)
        return found.logits, found.maps

    def not_a_number(images, targets):
        found = explainer.explain(images)
        return found.logits, found.maps * float("nan")

    for wrong in (first_class_always, not_a_number):
        with pytest.raises(ParityError):
            exporters.check_parity(explainer, wrong, tolerance=1e-4)


def test_another_size(explainer):
    larger = at_size(explainer, (96, 128))
    assert larger.classifier.image_size == (96, 128)
    assert larger.attribute(torch.rand(1, 3, 96, 128)).shape == (1, 1, 96, 128)
    same = at_size(explainer, (64, 96))
    images = torch.rand(2, 3, 64, 96)
    assert torch.equal(same.attribute(images), explainer.attribute(images))


def test_the_graph_is_made_of_copies(explainer):
    graph = ExplainerGraph(explainer, precision="fp16")
    assert graph.classifier is not explainer.classifier and graph.head is not explainer.head


def test_a_graph_without_backbone_is_refused(explainer, tmp_path):
    with pytest.raises(ValueError, match="always holds the backbone"):
        export_explainer(explainer, tmp_path / "e.onnx", format="onnx", with_backbone=False)
    with pytest.raises(ValueError, match="is a folder"):
        export_explainer(explainer, tmp_path, format="onnx")


def test_sample_pictures_are_real_and_distinct():
    pictures = sample_pictures((32, 48))
    assert pictures.shape == (8, 3, 32, 48) and pictures.dtype == torch.uint8
    flat = pictures.flatten(1).float()
    assert flat.std(1).min() > 20
    assert (torch.cdist(flat, flat) + torch.eye(8) * 1e6).min() > 1000
