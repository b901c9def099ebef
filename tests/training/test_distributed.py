"""Training in several real processes (gloo, CPU): equal steps, bit-equal heads, the same run as one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RUN = """
import sys, warnings
warnings.filterwarnings("ignore")
import torch
from lightning import Callback, Trainer
from aha.data.demo_datamodule import DemoDataModule
from aha.objective import AHAObjective
from aha.training.module import ExplainerModule
from aha.refinement import RefineOptions
from aha.training.refinement import TestTimeRefinement
from aha.training.options import ClassifierOptions, HeadOptions, OptimizerOptions, TargetOptions

torch.set_num_threads(1)


class Keep(Callback):
    def on_fit_end(self, trainer, module):
        torch.save(
            {"step": trainer.global_step, "head": module.head.state_dict(), "skipped": module.bad_steps},
            f"{sys.argv[2]}/rank{trainer.global_rank}of{trainer.world_size}.pt",
        )

    def on_test_end(self, trainer, module):
        torch.save(module.test_means, f"{sys.argv[2]}/means{trainer.global_rank}of{trainer.world_size}.pt")


if __name__ == "__main__":
    world = int(sys.argv[1])
    torch.manual_seed(1)
    # Nothing random per rank, so that N ranks of batch B are one process of batch N·B.
    module = ExplainerModule(
        ClassifierOptions(name="test_vit", pretrained=False, image_size=[64, 64], model_kwargs={"num_classes": 10}),
        head=HeadOptions(width=16),
        objective=AHAObjective(min_grid=4, max_grid=6, num_fractions=2, noise=0.0),
        optimizer=OptimizerOptions(lr=1e-4),
        targets=TargetOptions(other_share=0.0),
        compare=[],
    )
    data = DemoDataModule(batch_size=4 // world, train_length=32, val_length=5, test_length=7, eval_batch_size=2)
    refinement = TestTimeRefinement(RefineOptions(steps=2, grids=[4], references=["mean"], num_fractions=2))
    trainer = Trainer(
        accelerator="cpu", devices=world, strategy="ddp_spawn" if world > 1 else "auto", max_steps=3, max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, num_sanity_val_steps=0, val_check_interval=2, callbacks=[Keep(), refinement],
    )
    trainer.fit(module, data)
    trainer.test(module, data, verbose=False)
"""


def run(world: int, folder: Path) -> None:
    script = folder / "run.py"
    script.write_text(RUN)
    command = [sys.executable, str(script), str(world), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2],
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_agree_and_equal_one_process(world: int, tmp_path) -> None:
    run(1, tmp_path)
    run(world, tmp_path)
    single = torch.load(tmp_path / "rank0of1.pt", weights_only=True)
    ranks = [torch.load(tmp_path / f"rank{r}of{world}.pt", weights_only=True) for r in range(world)]
    assert {r["step"] for r in ranks} == {3} == {single["step"]}
    for rank in ranks[1:]:
        assert all(torch.equal(rank["head"][key], ranks[0]["head"][key]) for key in rank["head"])
    for key, value in single["head"].items():
        torch.testing.assert_close(ranks[0]["head"][key], value, atol=2e-5, rtol=1e-3)
    # Seven test samples don't divide by the ranks: each counts once all the same.
    expected = torch.load(tmp_path / "means0of1.pt", weights_only=True)
    for r in range(world):
        means = torch.load(tmp_path / f"means{r}of{world}.pt", weights_only=True)
        assert means.keys() == expected.keys()
        assert all(means[name] == pytest.approx(expected[name], abs=2e-4) for name in means)
        assert means["object_mask/pointing_game"] == 1.0
        assert "aha refined/insertion" in means
