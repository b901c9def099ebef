"""Every file in configs/ trains, validates, tests and leaves its artefact, with a tiny backbone and tiny data."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image

import aha
from aha.cli.train import main
from tests.data.test_cutouts import CLASSES, draw_backgrounds, draw_cutouts

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
TRAINING = [path for path in CONFIGS if "evaluat" not in path.stem]

pytestmark = [pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("shards")
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 12), ("val", 4)):
        with tarfile.open(folder / f"{split}-0000.tar", "w") as tar:
            for i in range(count):
                pixels = (torch.rand(40, 48, 3, generator=generator) * 255).byte().numpy()
                buffer = io.BytesIO()
                Image.fromarray(pixels).save(buffer, "JPEG")
                for suffix, data in (("jpg", buffer.getvalue()), ("cls", str(i % 5).encode())):
                    member = tarfile.TarInfo(f"{split}{i:04d}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return {split: str(folder / f"{split}-0000.tar") for split in ("train", "val")}


def test_there_are_configs() -> None:
    assert {"demo", "demo_convnext", "imagenet_vit_b16", "imagenet_vit_b32", "imagenet_convnext_small"} <= {
        path.stem for path in TRAINING
    }


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_config_runs_end_to_end(path: Path, shards: dict[str, str], tmp_path, monkeypatch, capsys) -> None:
    tiny = "test_convnext" if "convnext" in path.stem else "test_vit"
    output = tmp_path / "run"
    args = [
        f"--config={path}",
        f"--output={output}",
        f"--model.classifier.name={tiny}",
        "--model.classifier.pretrained=false",
        "--model.classifier.checkpoint_path=null",
        "--model.classifier.image_size=[64,64]",
        "--model.objective.num_fractions=2",
        "--model.head.width=16",
        "--trainer.accelerator=cpu",
        "--trainer.devices=1",
        "--trainer.precision=32-true",
        "--trainer.max_steps=2",
        "--trainer.val_check_interval=1",
        "--trainer.limit_val_batches=1",
        "--trainer.limit_test_batches=1",
    ]
    if path.stem == "cutouts":
        args += ["--model.classifier.model_kwargs={num_classes: 2}", "--model.classifier.class_names=null"]
        args += [f"--data.stamps={draw_cutouts(tmp_path / 'stamps')}", f"--data.classes={json.dumps(CLASSES)}"]
        args += [f"--data.backgrounds={draw_backgrounds(tmp_path / 'photos')}", "--data.image_size=64"]
        args += ["--data.batch_size=2", "--data.eval_batch_size=2", "--data.val_length=4", "--data.test_length=4"]
    elif "demo" in path.stem:
        args += ["--model.classifier.model_kwargs={num_classes: 10}", "--data.train_length=64", "--data.batch_size=2"]
        args += ["--data.eval_batch_size=2", "--data.val_length=4", "--data.test_length=4"]
    else:
        args += [f"--data.train={shards['train']}", f"--data.val={shards['val']}", "--data.train_samples=12"]
        args += ["--data.image_size=64"]
        args += ["--data.batch_size=2", "--data.num_workers=0"]
    if "encoder" in path.stem:
        args += [
            "--model.encoder.name=test_vit2",
            "--model.encoder.pretrained=false",
            "--model.encoder.image_size=[64,64]",
        ]
    if path.stem == "demo":
        # A callback of one's own joins those that every run has.
        args += [
            "--trainer.callbacks+=aha.training.refinement.TestTimeRefinement",
            "--trainer.callbacks.options.steps=1",
        ]
    monkeypatch.setattr("sys.argv", ["train.py"])
    main(args)
    assert {"checkpoints", "explainer", "contact_sheet.png", "summary.json"} <= {p.name for p in output.iterdir()}
    summary = json.loads((output / "summary.json").read_text())
    assert summary["steps"] >= 1
    assert {"aha/insertion", "aha/deletion", "random/insertion"} <= set(summary["test"])
    assert ("aha refined/insertion" in summary["test"]) == (path.stem == "demo")
    config = json.loads((output / "explainer" / "config.json").read_text())
    assert config["classifier"]["name"] == tiny
    loaded = aha.load(output / "explainer")  # the backbone's random weights came along
    assert loaded.record["training"]["steps"] == summary["steps"]
    assert "ins − del" in capsys.readouterr().out


def test_a_misspelt_key_is_named(capsys) -> None:
    with pytest.raises(SystemExit):
        main([f"--config={CONFIGS[0]}", "--model.objectve.noise=0.1"])
    printed = capsys.readouterr().err
    assert "unrecognized arguments: --model.objectve.noise=0.1. Did you mean --model.objective.noise?" in printed
    assert len(printed.splitlines()) == 2  # and where help is, not all options


def test_a_misspelt_key_of_a_file_is_named(tmp_path, capsys) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("model: {objective: {min_gird: 4}}\n")
    with pytest.raises(SystemExit) as stop:
        main([f"--config={CONFIGS[0]}", f"--config={file}"])
    assert stop.value.code == 2
    assert "Did you mean model.objective.min_grid?" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut short", b"not a checkpoint at all"])
def test_a_checkpoint_that_is_none_ends_in_one_message(content: bytes, tmp_path) -> None:
    (tmp_path / "last.ckpt").write_bytes(content)
    (tmp_path / "best.ckpt").touch()
    demo = next(path for path in TRAINING if path.stem == "demo")
    arguments = [f"--config={demo}", f"--output={tmp_path / 'run'}", f"--ckpt_path={tmp_path / 'last.ckpt'}"]
    with pytest.raises(SystemExit, match=r"last.ckpt can't be read as a checkpoint.*: resume from .*best.ckpt\."):
        main(arguments)


def test_help_teaches(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "--config configs/demo.yaml" in text
    assert "--ckpt_path" in text
    assert "points on each curve" in text
    assert "timm model name" in text


def test_print_config_is_complete(capsys) -> None:
    with pytest.raises(SystemExit):
        main([f"--config={CONFIGS[0]}", "--print_config"])
    text = capsys.readouterr().out
    assert "num_fractions" in text
    assert "temperature" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.classifier.name=vit_tinyy_patch16_224"], "timm has no model 'vit_tinyy_patch16_224'. Nearest: vit_"),
        (
            [
                "--model.classifier.name=test_vit",
                "--model.classifier.pretrained=false",
                "--model.classifier.image_size=[64,64]",
                "--data.image_size=96",
            ],
            "read at 96×96 pixels, test_vit takes 64×64: pass --data.image_size '.64, 64.'",
        ),
    ],
)
def test_wrong_names_and_sizes_end_in_one_message(arguments: list[str], message: str, shards: dict[str, str]) -> None:
    config = Path(__file__).parents[2] / "configs" / "imagenet_vit_b16.yaml"
    data = [f"--data.train={shards['train']}", "--data.train_samples=12", "--trainer.accelerator=cpu"]
    with pytest.raises(SystemExit, match=message):
        main([f"--config={config}", *data, *arguments])
