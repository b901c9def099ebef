"""Every benchmark runs, at toy sizes; and the step that others are measured against is the published one."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from aha.cli import evaluate, train
from tests.benchmarks import (
    demo_training,
    evaluation,
    explain,
    photo_study,
    profile_step,
    quality,
    reference_step,
    scale_on_paper,
    scaling,
    soft_sort,
    step_options,
    timing,
    training_step,
)

TOY = ["--rounds", "1", "--size", "64"]


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_training_step_computes_the_published_loss(capsys):
    training_step.main([*TOY, "--classifier=test_vit", "--batch=2", "--grid=4", "--fractions=4"])
    printed = capsys.readouterr().out
    assert "difference" in printed and "published" in printed


def test_a_different_loss_stops_the_benchmark(monkeypatch):
    real = training_step.reference_loss
    monkeypatch.setattr(training_step, "reference_loss", lambda *a, **k: real(*a, **k) + 2e-4)
    with pytest.raises(SystemExit, match="don't compute the same loss"):
        training_step.main([*TOY, "--classifier=test_vit", "--batch=1", "--grid=4", "--fractions=4"])


def test_peak_memory_is_measured_in_processes_of_their_own(capsys):
    toy = ["--classifier=test_vit", "--size=64", "--batch=1", "--grid=4", "--fractions=3", "--memory"]
    training_step.main(toy)
    assert "MiB above idle" in capsys.readouterr().out


def test_step_options(capsys, monkeypatch):
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **_: compiler(call, backend="eager"))  # no C++ compiler
    step_options.main([*TOY, "--classifier=test_vit", "--batch=1", "--grid=4", "--chunks", "5"])
    printed = capsys.readouterr().out
    assert all(side in printed for side in ("bf16-mixed", "compiled", "taken apart", "chunks of 5"))


def test_soft_sort(capsys):
    soft_sort.main(["--rounds=1", "--regions=16", "--batch=2", "--fractions=4"])
    assert "n × n" in capsys.readouterr().out


def test_explain(capsys):
    explain.main([*TOY, "--model=test_vit", "--batch=1", "--baselines"])
    assert "gradskip" in capsys.readouterr().out


@pytest.mark.parametrize("classifier", [[], ["--classifier=test_vit"]], ids=["demo", "timm"])
def test_evaluation(classifier, capsys):
    evaluation.main([*classifier, "--samples=2", "--repeats=1"])
    assert "with intervals and report" in capsys.readouterr().out


def test_profile(capsys):
    profile_step.main([*TOY, "--classifier=test_vit", "--batch=1", "--grid=4"])
    printed = capsys.readouterr().out
    assert all(part in printed for part in profile_step.PARTS)
    share = sum(float(line.split()[-1][:-1]) for line in printed.splitlines() if line.endswith("%"))
    assert share == pytest.approx(100, abs=1)


def test_scaling(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "peak_above_idle", lambda *_: 1.0)
    output = tmp_path / "plot.png"
    sizes = ["--batches", "1", "2", "--fractions", "2", "3", "--grids", "2", "3", "--chunks", "2", "4"]
    scaling.main([*TOY, *sizes, f"--output={output}"])
    assert output.stat().st_size > 1000
    assert "straight line" in capsys.readouterr().out


TINY = """
model:
  classifier: {name: test_vit, image_size: [64, 64], model_kwargs: {num_classes: 10}}
  head: {width: 16}
  objective: {min_grid: 4, max_grid: 4, num_fractions: 3}
  compare: [random]
data: {init_args: {batch_size: 2, num_workers: 2}}
trainer: {val_check_interval: 0.5, limit_val_batches: 4}
"""

TINY_PHOTOS = """
model:
  classifier: {name: test_vit, pretrained: false, image_size: [64, 64], model_kwargs: {num_classes: 10}}
  head: {width: 8}
  objective: {min_grid: 4, max_grid: 4, num_fractions: 2}
data:
  class_path: aha.data.datamodules.FolderDataModule
  init_args: {train: null, batch_size: 2, image_size: 64, num_workers: 0}
trainer: {accelerator: cpu, logger: false}
"""


def test_scale_on_paper_by_hand(capsys, tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    scale_on_paper.main([f"--config={tmp_path / 'tiny.yaml'}", "--gpus", "1", "4", "--images=800", "--rate=1e-1"])
    printed = capsys.readouterr().out
    rows = [line.split(" | ") for line in printed.splitlines() if line.startswith(("| 1 ", "| 4 "))]
    assert [row[1] for row in rows] == ["400", "100"]
    assert [row[4] for row in rows] == ["66.67", "16.67"]  # 800 / (GPUs · 2 · 0.1) seconds
    assert [row[-1] for row in rows] == ["input |", "input |"]
    costs = scale_on_paper.Costs(encode=10, head=3, perturbed=20, forward=10, parameters=1000)
    plan = scale_on_paper.Plan(costs, 2, 1.0, 600, 5, 1, 7, 9, flops=1.0, wire=8.0)
    assert plan.minutes(2) == pytest.approx(
        {
            "classifier": 600 * 90 / 2 / 60,
            "head": 600 * 3 / 2 / 60,
            "input": 600 / 2 / 60,
            "all-reduce": 60 * 4000 * 2 / 2 / 8 / 60,
            "validation": 7 * 400 / 60,
            "test": 9 * 400 / 2 / 60,
        }
    )


def test_counted_parts_are_those_of_a_training_step():
    module = scale_on_paper.build(yaml.safe_load(TINY))
    costs, images = scale_on_paper.count(module), torch.rand(1, 3, 64, 64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        output = module.explainer.encode(images)
        targets = output.logits.argmax(-1)
        maps = module.explainer.decode(output, images, targets)
        draw = module.objective.draw((64, 64), torch.Generator().manual_seed(0))
        module.objective(module.classifier, images, maps, targets, draw, temperature=0.5).loss.backward()
    assert counter.get_total_flops() == pytest.approx(costs.training(3), rel=0.01)
    seen = []
    with torch.no_grad():
        module.classifier.model.register_forward_hook(lambda _m, _i, out: seen.append(len(out)))
        module.on_validation_epoch_start()
        module.score({"image": images}, others=False)
    assert sum(seen) == pytest.approx(scale_on_paper.HARD_FORWARDS, abs=1)


@pytest.mark.parametrize("what", ["time", "fractions", "sort"])
def test_quality(what, capsys, tmp_path, monkeypatch):
    small = {"batch_size": 1, "train_length": 2}
    monkeypatch.setitem(demo_training.CONFIG["data"], "init_args", small)
    monkeypatch.setitem(demo_training.CONFIG["model"], "objective", {"min_grid": 2, "max_grid": 2})
    output = tmp_path / "quality.json"
    quality.main([f"--what={what}", "--seconds=0.01", "--steps=1", "--pictures=2", f"--output={output}"])
    assert what in json.loads(output.read_text())
    assert "CPU s" in capsys.readouterr().out


def test_photo_study(capsys, tmp_path, monkeypatch):
    for name in ("train", "new"):
        (tmp_path / name).mkdir()
        for i in range(2):
            Image.new("RGB", (64, 64), (120 * i, 90, 200)).save(tmp_path / name / f"{i}.png")
    (tmp_path / "tiny.yaml").write_text(TINY_PHOTOS)
    scripts = {"train.py": train.main, "evaluate.py": evaluate.main}
    calls = []

    def run(script, *arguments, log):
        calls.append(script)
        scripts[script]([argument for argument in arguments if "train_samples" not in argument])

    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setattr(photo_study, "run", run)
    monkeypatch.setattr(photo_study, "CONFIG", tmp_path / "tiny.yaml")
    shards = [f"--train={tmp_path / 'train'}", f"--held_out={tmp_path / 'new'}", "--samples=2"]
    arguments = [*shards, "--steps=1", f"--output={tmp_path / 'study'}", "--variants"]
    photo_study.main([*arguments, "rate 3e-3"])
    photo_study.main([*arguments, "rate 3e-3", "width 16"])
    assert calls == ["train.py"] * 2 + ["evaluate.py"] * 2 + ["train.py"] + ["evaluate.py"] * 2  # nothing twice
    figures = json.loads((tmp_path / "study" / "study.json").read_text())
    assert list(figures) == ["base", "rate 3e-3", "width 16"]
    assert figures["width 16"]["held out"]["difference"] is not None
    assert "trained on" in capsys.readouterr().out


def test_a_failed_run_of_a_study_shows_its_end(tmp_path):
    with pytest.raises(SystemExit, match=r"train.py --config=nowhere.yaml\nfailed:\n(.|\n)*nowhere.yaml"):
        photo_study.run("train.py", "--config=nowhere.yaml", log=tmp_path / "log")


def test_reference_masks_by_hand():
    permutation = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])  # region 1 first, then region 0
    masks = reference_step.cumulative_masks(permutation, torch.tensor([0.0, 0.25, 0.75, 1.0]))
    torch.testing.assert_close(masks[0], torch.tensor([[0.0, 0.0], [0.0, 0.5], [0.5, 1.0], [1.0, 1.0]]))


def test_sides_take_turns():
    order: list[str] = []
    timing.alternate({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    assert order == ["a", "b"] * 3
