"""Shards written from a folder: same bytes each time, taken up after a kill, verified."""

from __future__ import annotations

import hashlib
import json
import tarfile

import pytest
from PIL import Image

from aha.data import write_shards as module
from aha.data.folder import FolderDataset
from aha.data.loaders import EvalLoader
from aha.data.one_shard import ShardWriteError
from aha.data.pipeline import Recipe
from aha.data.shards import ShardSource
from aha.data.sources import expand_urls, info_samples
from aha.data.write_shards import write_shards
from tests.data.pictures_on_the_fly import encode, plain


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "pictures"
    for number in range(11):
        path = root / f"class {number % 2}" / f"ü.{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(plain(number)))
    (root / "class 0/same.jpg").write_bytes(encode(plain(100), "JPEG"))
    (root / "class 0/same.png").write_bytes(encode(plain(101)))
    (root / "class 1/scan.tif").write_bytes(encode(Image.fromarray(plain(102)), "TIFF"))
    (root / "class 1/scan.mask.png").write_bytes(encode(plain(1)[..., 0]))
    return root


def write(folder, output, **options):
    return write_shards(str(folder), str(output), **{"shard_size": 4, "progress": False, **options})


def hashes(output):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(output.iterdir())}


def test_what_is_written_is_what_is_read(folder, tmp_path):
    info = write(folder, tmp_path / "out")
    assert info["num_samples"] == 14 and info["shard_lengths"] == [4, 4, 4, 2]
    shards = expand_urls(str(tmp_path / "out"))
    assert info_samples(shards) == 14
    recipe = Recipe(image_size=(9, 12), batch_size=14, max_bad_rate=0.0)
    (batch,) = EvalLoader(ShardSource(shards=tuple(shards)), recipe)
    (direct,) = EvalLoader(FolderDataset(folder, image_size=(9, 12)), recipe)
    got = {
        tuple(image.flatten().tolist()): int(label) for image, label in zip(batch["image"], batch["label"], strict=True)
    }
    assert got == {tuple(i.flatten().tolist()): int(n) for i, n in zip(direct["image"], direct["label"], strict=True)}
    assert len(set(batch["key"])) == 14 and all("." not in key for key in batch["key"])
    with tarfile.open(shards[0]) as tar:
        members = tar.getmembers()
        assert all(member.mtime == 0 and member.uname == "" for member in members)
        entry = json.load(tar.extractfile(next(m for m in members if m.name.endswith(".json"))))
    assert {"filename", "label", "width", "height", "class"} <= set(entry) and entry["height"] == 9


def test_same_bytes_on_any_number_of_workers(folder, tmp_path):
    write(folder, tmp_path / "one")
    write(folder, tmp_path / "two", workers=2)
    assert hashes(tmp_path / "one") == hashes(tmp_path / "two")
    write(folder, tmp_path / "other", seed=1)
    assert hashes(tmp_path / "one") != hashes(tmp_path / "other")


@pytest.mark.parametrize("killed_in", [0, 2])
def test_a_killed_run_is_taken_up(folder, tmp_path, monkeypatch, killed_in):
    write(folder, tmp_path / "whole")
    out, real, calls = tmp_path / "out", module.write_shard, []

    def dies(job):
        if len(calls) == killed_in:
            raise KeyboardInterrupt
        calls.append(job.path)
        return real(job)

    monkeypatch.setattr(module, "write_shard", dies)
    with pytest.raises(KeyboardInterrupt):
        write(folder, out)
    (out / "train-00002.tar.part").write_bytes(b"half a shard")  # what kill -9 leaves behind
    with (out / "_progress-train.jsonl").open("a") as record:
        record.write('{"name": "train-0000')
    assert not (out / "_info.json").exists()
    calls.clear()
    monkeypatch.setattr(module, "write_shard", lambda job: calls.append(job.path) or real(job))
    write(folder, out)
    assert len(calls) == 4 - killed_in
    assert hashes(out) == hashes(tmp_path / "whole")
    calls.clear()
    write(folder, out)  # complete: nothing to do
    assert not calls and hashes(out) == hashes(tmp_path / "whole")
    (out / "train-00001.tar").write_bytes(b"rotten")
    write(folder, out)
    assert len(calls) == 1 and hashes(out) == hashes(tmp_path / "whole")


def test_other_contents_are_refused(folder, tmp_path):
    write(folder, tmp_path / "out")
    with pytest.raises(ShardWriteError, match="other options"):
        write(folder, tmp_path / "out", shard_size=5)
    (folder / "class 0/new.png").write_bytes(encode(plain(55)))
    with pytest.raises(ShardWriteError, match="choose another output"):
        write(folder, tmp_path / "out")
    write(folder, tmp_path / "out", split="val")
    assert set(json.loads((tmp_path / "out/_info.json").read_text())["splits"]) == {"train", "val"}


def test_what_reads_back_otherwise_is_not_named(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("aha.data.one_shard.os.fsync", lambda descriptor: _spoil(tmp_path / "out"))
    with pytest.raises(ShardWriteError, match="read back"):
        write(folder, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.tar*"))


def _spoil(out):
    (part,) = out.glob("*.part")
    data = bytearray(part.read_bytes())
    data[1100] ^= 1
    part.write_bytes(bytes(data))


def test_a_full_disk_keeps_what_is_finished(folder, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("aha.data.one_shard.os.fsync", full)
    with pytest.raises(ShardWriteError, match="No space left.*run again"):
        write(folder, tmp_path / "out")
    monkeypatch.undo()
    assert write(folder, tmp_path / "out")["num_samples"] == 14


def test_unreadable_pictures_are_left_out_and_listed(folder, tmp_path):
    (folder / "class 0/broken.png").write_bytes(b"nothing")
    with pytest.raises(ShardWriteError, match="1 of 15 pictures are unreadable"):
        write(folder, tmp_path / "out")
    info = write(folder, tmp_path / "out", max_bad_rate=0.1)
    assert info["num_samples"] == 14 and len(info["skipped"]) == 1 and "broken.png" in info["skipped"][0]


def test_options_out_of_range(folder, tmp_path):
    for wrong in ({"shard_size": 0}, {"workers": 0}, {"split": "a/b"}):
        with pytest.raises(ValueError, match="got"):
            write(folder, tmp_path / "out", **wrong)
