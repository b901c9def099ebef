"""Every benchmark runs, at toy sizes; and the step that others are measured against is the published one."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks import explain, profile_step, reference_step, scaling, soft_sort, timing, training_step

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


def test_soft_sort(capsys):
    soft_sort.main(["--rounds=1", "--regions=16", "--batch=2", "--fractions=4"])
    assert "n × n" in capsys.readouterr().out


def test_explain(capsys):
    explain.main([*TOY, "--model=test_vit", "--batch=1", "--baselines"])
    assert "gradskip" in capsys.readouterr().out


def test_profile(capsys):
    profile_step.main([*TOY, "--classifier=test_vit", "--batch=1", "--grid=4"])
    printed = capsys.readouterr().out
    assert all(part in printed for part in profile_step.PARTS)
    share = sum(float(line.split()[-1][:-1]) for line in printed.splitlines() if line.endswith("%"))
    assert share == pytest.approx(100, abs=1)


def test_scaling(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "peak_above_idle", lambda *_: 1.0)
    output = tmp_path / "plot.png"
    sizes = ["--batches", "1", "2", "--fractions", "2", "3", "--grids", "2", "3", f"--output={output}"]
    scaling.main([*TOY, *sizes])
    assert output.stat().st_size > 1000
    assert "straight line" in capsys.readouterr().out


def test_reference_masks_by_hand():
    permutation = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])  # region 1 first, then region 0
    masks = reference_step.cumulative_masks(permutation, torch.tensor([0.0, 0.25, 0.75, 1.0]))
    torch.testing.assert_close(masks[0], torch.tensor([[0.0, 0.0], [0.0, 0.5], [0.5, 1.0], [1.0, 1.0]]))


def test_sides_take_turns():
    order: list[str] = []
    timing.alternate({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    assert order == ["a", "b"] * 3
