"""A run over shards that is killed without warning ends, once resumed, where the uninterrupted one ends."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from lightning import Callback

from tests.data.pictures_on_the_fly import encode, write_tar

ROOT = Path(__file__).parents[2]
EPOCHS, STEPS = 2, 12  # steps per epoch
ARGUMENTS = [
    "--seed_everything=3",
    "--model.classifier.name=test_vit",
    "--model.classifier.pretrained=false",
    "--model.classifier.image_size=[64,64]",
    "--model.classifier.model_kwargs={num_classes: 10}",
    "--model.head.width=16",
    "--model.objective={min_grid: 4, max_grid: 6, num_fractions: 2}",
    "--data=aha.data.datamodules.ShardDataModule",
    "--data.image_size=64",
    "--data.batch_size=2",
    "--data.num_workers=1",
    "--data.shuffle_buffer=10",
    "--data.max_bad_rate=0.2",
    f"--data.train_samples={2 * STEPS}",
    f"--trainer.max_epochs={EPOCHS}",
    "--trainer.accelerator=cpu",
    "--trainer.logger=false",
    "--trainer.val_check_interval=4",
    "--trainer.limit_val_batches=1",
    "--checkpoint_minutes=0",  # at step 20, besides those after validation
    "--test=false",
]


class Kill9(Callback):
    """SIGKILL to this very process before the given step: no signal handler, no cleaning up."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, *_) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, name: str, *more: str) -> int:
    data = [f"--data.train={folder}/train-{{0..2}}.tar", f"--data.val={folder}/train-0.tar"]
    command = [sys.executable, "train.py", f"--output={folder / name}", *ARGUMENTS, *data, *more]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
    return done.returncode


def last(folder: Path, name: str) -> dict:
    return torch.load(folder / name / "checkpoints" / "last.ckpt", weights_only=True)


def test_killed_at_a_random_step_and_resumed_it_ends_bit_equal(tmp_path) -> None:
    rng = np.random.default_rng(0)
    for shard in range(3):
        members = []
        for number in range(7):
            members.append((f"{shard}{number}.jpg", encode(rng.integers(0, 255, (40, 50, 3), np.uint8), "JPEG")))
            members.append((f"{shard}{number}.cls", b"%d" % number))
        write_tar(tmp_path / f"train-{shard}.tar", [*members, (f"{shard}9.jpg", b"")])  # one member is unreadable
    step = random.SystemRandom().randrange(4, EPOCHS * STEPS)

    assert train(tmp_path, "whole") == 0
    killer = ["--trainer.callbacks+=tests.training.test_kill_9.Kill9", f"--trainer.callbacks.step={step}"]
    assert train(tmp_path, "killed", *killer) == -signal.SIGKILL
    at = last(tmp_path, "killed")["global_step"]
    assert 0 < at <= step, (at, step)
    assert train(tmp_path, "killed", f"--ckpt_path={tmp_path}/killed/checkpoints/last.ckpt") == 0

    whole, resumed = last(tmp_path, "whole"), last(tmp_path, "killed")
    assert whole["global_step"] == resumed["global_step"] == EPOCHS * STEPS
    for key, value in whole["state_dict"].items():
        assert torch.equal(value, resumed["state_dict"][key]), f"{key} differs: killed at step {step}, resumed at {at}"
    for mine, other in zip(whole["optimizer_states"], resumed["optimizer_states"], strict=True):
        assert mine["param_groups"] == other["param_groups"]
        for index, state in mine["state"].items():
            assert all(torch.equal(value, other["state"][index][name]) for name, value in state.items())
    assert whole["lr_schedulers"] == resumed["lr_schedulers"]
