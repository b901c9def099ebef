"""Artefacts: bit-equal round trips, refusals with reasons, and saves that a kill can't break."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from trained_like import trained_like

import aha
from aha.backbone import FrozenBackbone
from aha.export import artifact, build_from_config, explainer_config
from aha.export.artifact import config_hash

FIXTURE = Path(__file__).parents[1] / "fixtures" / "artifact-v1"


@pytest.fixture
def images(vit):
    return torch.rand(2, 3, *vit.image_size)


@pytest.fixture
def folder(explainer, tmp_path):
    return explainer.save(tmp_path / "artefact", training={"steps": 3}, metrics={"insertion": 0.7})


def edit(folder, change, *, rehash=True):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    if rehash:
        config["sha256"] = config_hash(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("options", [{}, {"class_vector": "embedding"}, {"evidence": False, "width": 16}])
def test_round_trip_is_bit_equal(vit, images, tmp_path, options):
    explainer = trained_like(vit, **options)
    loaded = aha.load(explainer.save(tmp_path / "a"), classifier=vit)
    assert torch.equal(loaded.attribute(images, [1, 3]), explainer.attribute(images, [1, 3]))
    assert loaded.options == explainer.options


def test_the_folder_is_readable_and_the_record_survives(folder, vit):
    assert sorted(p.name for p in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    config = json.loads((folder / "config.json").read_text())
    assert config["backbone"]["fingerprint"] == vit.fingerprint()
    assert config["preprocessing"]["image_size"] == [64, 96]
    assert set(config["versions"]) == {"aha", "torch", "timm"}
    assert "| steps | 3 |" in (folder / "README.md").read_text()
    assert aha.load(folder, classifier=vit).record == {"training": {"steps": 3}, "metrics": {"insertion": 0.7}}


def test_backbone_stored_along_needs_no_other_source(explainer, images, tmp_path):
    loaded = aha.load(explainer.save(tmp_path / "a", with_backbone=True))
    assert loaded.classifier is not explainer.classifier
    assert torch.equal(loaded.attribute(images), explainer.attribute(images))


def test_a_separate_encoder_travels_along(vit, images, tmp_path):
    encoder = FrozenBackbone.from_timm("test_convnext", pretrained=False, image_size=(96, 64), num_classes=0)
    explainer = trained_like(vit, encoder=encoder)
    loaded = aha.load(explainer.save(tmp_path / "a", with_backbone=True))
    assert torch.equal(loaded.attribute(images), explainer.attribute(images))
    with pytest.raises(ValueError, match="test_convnext differ"):
        aha.load(explainer.save(tmp_path / "b"), classifier=vit)  # its random weights can't be rebuilt


def test_local_backbone_file(explainer, folder, images, tmp_path):
    path = tmp_path / "weights.pth"
    torch.save(explainer.classifier.model.state_dict(), path)
    assert torch.equal(aha.load(folder, checkpoint_path=path).attribute(images), explainer.attribute(images))


def test_another_backbone_is_refused(folder, vit, convnext):
    with pytest.raises(ValueError, match="trained for test_vit"):
        aha.load(folder, classifier=convnext)
    with pytest.raises(ValueError, match="differ from those that the explainer was trained for"):
        aha.load(folder)  # rebuilt with other random weights
    other = aha.FrozenClassifier(vit.model, mean=(0.1, 0.5, 0.5), std=(0.5, 0.5, 0.5), image_size=(64, 96))
    with pytest.raises(ValueError, match="normalises with mean"):
        aha.load(folder, classifier=other)


def test_a_users_own_module_must_be_passed_again(small_cnn, tmp_path):
    model = copy.deepcopy(small_cnn.model).float()
    sizes = {"image_size": (24, 36), "mean": [0.5] * 3, "std": [0.5] * 3}
    small_cnn = aha.FrozenClassifier(model, **sizes, feature_layers=["body"], class_layer="fc")
    explainer = trained_like(small_cnn)
    images = torch.rand(1, 3, 24, 36)
    folder = explainer.save(tmp_path / "a")
    with pytest.raises(ValueError, match=r"classifier=FrozenClassifier"):
        aha.load(folder)
    assert torch.equal(aha.load(folder, classifier=small_cnn).attribute(images), explainer.attribute(images))


def test_missing_things_are_named(tmp_path, folder, vit):
    with pytest.raises(FileNotFoundError, match="no explainer at"):
        aha.load(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"Did you mean .*artefact"):
        aha.load(folder.parent)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model.safetensors is missing"):
        aha.load(folder, classifier=vit)


def test_a_recorded_weights_file_that_is_gone(vit, tmp_path):
    import safetensors.torch

    source = tmp_path / "backbone.safetensors"
    safetensors.torch.save_file(vit.model.state_dict(), source)
    classifier = aha.FrozenClassifier.from_timm(
        "test_vit", checkpoint_path=str(source), image_size=(64, 96), num_classes=7
    )
    folder = trained_like(classifier).save(tmp_path / "a")
    aha.load(folder)
    source.rename(tmp_path / "moved.safetensors")
    with pytest.raises(FileNotFoundError, match="pass a copy as checkpoint_path"):
        aha.load(folder)
    aha.load(folder, checkpoint_path=tmp_path / "moved.safetensors")


def test_newer_and_foreign_configs(folder, vit):
    edit(folder, lambda c: c.update(format_version=99))
    with pytest.raises(ValueError, match="format version 99"):
        aha.load(folder, classifier=vit)
    edit(folder, lambda c: c.update(kind="something"))
    with pytest.raises(ValueError, match="does not describe an aha explainer"):
        aha.load(folder, classifier=vit)
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="damaged"):
        aha.load(folder, classifier=vit)


def test_an_edited_config_is_refused(folder, vit):
    edit(folder, lambda c: c["explainer"].update(evidence=False), rehash=False)
    with pytest.raises(ValueError, match="changed or damaged"):
        aha.load(folder, classifier=vit)


def test_a_head_that_does_not_fit(folder, vit):
    edit(folder, lambda c: c["explainer"].update(width=16))
    with pytest.raises(ValueError, match="don't fit"):
        aha.load(folder, classifier=vit)


def test_training_checkpoints_load_through_the_same_door(explainer, images, tmp_path, vit):
    state = {f"head.{key}": value for key, value in explainer.head.state_dict().items()}
    path = tmp_path / "best.ckpt"
    torch.save({"state_dict": state, "explainer": explainer_config(explainer), "epoch": 1}, path)
    assert torch.equal(aha.load(path, classifier=vit).attribute(images), explainer.attribute(images))
    state.popitem()
    torch.save({"state_dict": state, "explainer": explainer_config(explainer)}, path)
    with pytest.raises(ValueError, match="Missing key"):
        aha.load(path, classifier=vit)
    torch.save({"state_dict": {}}, path)
    with pytest.raises(ValueError, match="no 'explainer' entry"):
        aha.load(path)
    torch.save(nn.Linear(1, 1), path)  # a pickled module: refused, not executed
    with pytest.raises(ValueError, match="asks for code"):
        aha.load(path)


def test_a_hub_id_without_a_network_is_a_clear_error(monkeypatch):
    import huggingface_hub

    def unreachable(*_args, **_kwargs):
        raise ConnectionError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(FileNotFoundError, match="the hub did not yield it"):
        aha.load("somebody/some-explainer")


def test_the_hub_folder_is_loaded_like_any_other(monkeypatch, folder, vit):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_args, **_kwargs: str(folder))
    assert aha.load("somebody/some-explainer", classifier=vit).options["width"] == 8


def test_the_first_releases_artefact_still_loads():
    loaded = aha.load(FIXTURE)
    images = torch.linspace(0, 1, 3 * 32 * 32).view(1, 3, 32, 32)
    expected = torch.tensor(json.loads((FIXTURE / "expected.json").read_text()))
    assert torch.allclose(loaded.attribute(images, 1)[0, 0, ::8, ::8], expected, atol=1e-4)


@pytest.mark.parametrize("fail_at", range(1, 5))
def test_a_save_that_dies_leaves_the_old_or_the_new(explainer, folder, vit, images, monkeypatch, fail_at):
    old = explainer.attribute(images)
    new = trained_like(vit)
    calls = 0

    def counted(original):
        def replace(source, destination):
            nonlocal calls
            calls += 1
            if calls == fail_at:
                raise KeyboardInterrupt
            original(source, destination)

        return replace

    monkeypatch.setattr(os, "replace", counted(os.replace))
    with pytest.raises(KeyboardInterrupt):
        new.save(folder)
    monkeypatch.undo()
    loaded = aha.load(folder, classifier=vit).attribute(images)
    assert torch.equal(loaded, old) or torch.equal(loaded, new.attribute(images))
    assert torch.equal(loaded, old) == (fail_at <= 2)
    third = trained_like(vit)
    third.save(folder)
    assert torch.equal(aha.load(folder, classifier=vit).attribute(images), third.attribute(images))


@pytest.mark.slow
def test_kill_nine_while_saving(tmp_path, vit, images):
    script = (
        "import sys, torch, aha\ne = aha.load(sys.argv[1])\n"
        "while True:\n    torch.nn.init.normal_(e.head.output.weight)\n"
        "    e.save(sys.argv[1], with_backbone=True)\n    print(flush=True)\n"
    )
    target = trained_like(vit).save(tmp_path / "a", with_backbone=True)
    for delay in (0.0, 0.003, 0.01, 0.02, 0.05):
        process = subprocess.Popen([sys.executable, "-c", script, str(target)], stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert aha.load(target, classifier=vit).attribute(images).isfinite().all()


def test_a_thousand_corruptions(explainer, folder, vit, images, monkeypatch):
    """Every one is a clear error or changes nothing: never a wrong map, another exception, or a hang."""
    expected = explainer.attribute(images)
    fingerprint = vit.fingerprint()
    monkeypatch.setattr(vit, "fingerprint", lambda: fingerprint, raising=False)
    originals = {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors")}
    draw = random.Random(0)
    refused = 0
    for trial in range(1000):
        name = ("config.json", "model.safetensors")[trial % 2]
        path = folder / name
        path.write_bytes(corrupt(bytearray(originals[name]), draw))
        try:
            loaded = aha.load(folder, classifier=vit)
        except (ValueError, FileNotFoundError) as error:
            assert str(folder) in str(error)
            refused += 1
        else:
            assert torch.equal(loaded.attribute(images), expected)
        path.write_bytes(originals[name])
    assert refused > 950


def corrupt(data: bytearray, draw: random.Random) -> bytes:
    kind = draw.randrange(6)
    at = draw.randrange(len(data))
    if kind == 0:
        data[at] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        del data[at : at + draw.randint(1, 20)]
    elif kind == 3:
        data[at:at] = draw.randbytes(draw.randint(1, 20))
    elif kind == 4:
        end = min(at + draw.randint(1, 200), len(data))
        data[at:end] = draw.randbytes(end - at)
    else:
        other = draw.randrange(len(data))
        data[at], data[other] = data[other], data[at]
    return bytes(data)


def test_weights_inconsistent_with_their_own_header_are_refused_even_with_a_matching_hash(folder, vit):
    import hashlib

    data = (folder / "model.safetensors").read_bytes()[:-40]
    (folder / "model.safetensors").write_bytes(data)
    edit(folder, lambda c: c["weights"].update(sha256=hashlib.sha256(data).hexdigest()))
    with pytest.raises(ValueError, match="not a safetensors file"):
        aha.load(folder, classifier=vit)


def test_build_from_config_checks_the_format(explainer):
    with pytest.raises(ValueError, match="does not describe"):
        build_from_config({}, {})
    assert artifact.FORMAT_VERSION == 1
