"""Shards: exact counts on any number of ranks and workers, seeded order, damage, dead sources, security."""

from __future__ import annotations

import collections
import http.server
import io
import json
import multiprocessing
import pickle
import threading
from itertools import islice

import fsspec
import pytest
import torch

from aha.data.loaders import EvalLoader, TrainLoader
from aha.data.pipeline import BadRateError, Recipe, Slot
from aha.data.shards import ShardSource
from aha.data.sources import ShardSourceError, expand_urls, info_samples
from tests.data.pictures_on_the_fly import encode, plain, write_shards_of, write_tar

LENGTHS = (5, 1, 9, 3, 3, 7, 2)  # 7 uneven shards, 30 samples
RECIPE = Recipe(image_size=(8, 8), batch_size=4, max_bad_rate=0.0)
LENIENT = Recipe(image_size=(8, 8), batch_size=4, max_bad_rate=0.5)


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> list[str]:
    return write_shards_of(tmp_path_factory.mktemp("shards"), LENGTHS)


def source(shards, **options) -> ShardSource:
    return ShardSource(shards=tuple(shards), **{"backoff": 0.001, "retries": 2, "shuffle_buffer": 5, **options})


def keys(loader) -> list[str]:
    return [key for batch in loader for key in batch["key"]]


EXPECTED = [f"s{number:04d}" for number in range(sum(LENGTHS))]


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_evaluation_is_exact_on_four_ranks_with_two_workers_each(shards, method):
    if method == "forkserver":
        multiprocessing.get_context("forkserver").set_forkserver_preload(["aha.data.shards", "aha.data.loaders"])
    got = []
    for rank in range(4):
        got += keys(EvalLoader(source(shards), RECIPE, rank=rank, world=4, workers=2, start_method=method))
    assert sorted(got) == EXPECTED


def test_a_spawned_worker_reads_its_share_only(shards):
    share = [sample.key for sample in source(shards).evaluate(Slot(3, 4, 0, 1))]
    assert 0 < len(share) < 30
    assert keys(EvalLoader(source(shards), RECIPE, rank=3, world=4, workers=1, start_method="spawn")) == share


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 8, 20, 40])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_sample_has_one_slot(shards, world, workers):
    slots = [Slot(rank, world, worker, workers) for rank in range(world) for worker in range(workers)]
    got = [sample.key for slot in slots for sample in source(shards).evaluate(slot)]
    assert sorted(got) == EXPECTED


def test_batches(shards):
    batches = list(EvalLoader(source(shards), RECIPE))
    assert [len(batch["key"]) for batch in batches] == [4] * 7 + [2]
    first = batches[0]
    assert set(first) == {"image", "label", "key"}
    assert first["image"].shape == (4, 3, 8, 8) and first["image"].dtype == torch.uint8
    assert first["label"].tolist() == [0, 1, 2, 3] and first["label"].dtype == torch.long
    assert first["image"][3, :, 0, 0].tolist() == [3, 252, 7]


def test_equal_steps_on_all_ranks_and_different_samples(shards):
    ranks = [TrainLoader(source(shards), RECIPE, steps=5, rank=rank, world=2, workers=2) for rank in range(2)]
    got = [list(loader) for loader in ranks]
    assert [len(batches) for batches in got] == [5, 5] == [len(loader) for loader in ranks]
    assert all(len(batch["key"]) == 4 for batches in got for batch in batches)
    first, second = ([batch["key"] for batch in batches] for batches in got)
    assert first != second and first[0] != first[1]  # ranks differ, workers differ


def test_order_depends_on_seed_epoch_step_rank_and_worker(shards):
    def order(seed=0, epoch=0, step=0, **slot):
        return tuple(sample.key for sample in islice(source(shards).train((seed, epoch, step), Slot(**slot), 0), 40))

    orders = [
        order(), order(seed=1), order(epoch=1), order(step=1), order(rank=1, world=2), order(worker=1, workers=2)
    ]  # fmt: skip
    assert len(set(orders)) == len(orders)
    assert order() == order()
    counts = collections.Counter(sample.key for sample in islice(source(shards).train((0, 0, 0), Slot(), 0), 3000))
    assert set(counts) == set(EXPECTED)  # resampling reaches every sample


def test_epochs_of_one_loader_differ_and_repeat_with_the_seed(shards):
    loader, again = (TrainLoader(source(shards), RECIPE, steps=4) for _ in range(2))
    first, second = keys(loader), keys(loader)
    assert first != second
    assert [keys(again), keys(again)] == [first, second]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", [1, 2, 5])
def test_resume_in_mid_epoch_continues_the_order(shards, tmp_path, workers, taken):
    bad = write_tar(tmp_path / "bad.tar", [(f"bad{n}.png", b"no picture") for n in range(3)])

    def loader(at):
        return TrainLoader(source([*shards, str(bad)]), LENIENT, steps=6, workers=workers, progress=lambda: at)

    whole = [batch["key"] for batch in loader((3, 18))]
    broken = loader((3, 18))
    began = iter(broken)
    assert [next(began)["key"] for _ in range(taken)] == whole[:taken]
    state = torch.load(_saved(broken.state_dict()), weights_only=True)
    began.close()
    resumed = loader((3, 18 + taken))
    resumed.load_state_dict(state)
    iter(resumed)  # trainers ask for iterators that they don't use
    assert [batch["key"] for batch in resumed] == whole[taken:]
    assert len(list(resumed)) == 6  # the next epoch is whole again
    resumed.load_state_dict(state)
    began = iter(resumed)
    assert next(began)["key"] == whole[taken]
    again = loader((3, 19 + taken))
    again.load_state_dict(resumed.state_dict())  # resumed twice
    assert taken == 5 or [batch["key"] for batch in again] == whole[taken + 1 :]


def _saved(state):
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    return stream


def test_a_state_of_another_epoch_is_left_aside(shards):
    """An epoch cut short by the trainer (limit_train_batches) ended before the loader did."""
    state = {"start": [3, 18], "done": 4, "read": [16], "layout": [1, 0, 4, 6, 0]}
    loader = TrainLoader(source(shards), RECIPE, steps=6, progress=lambda: (4, 22))
    loader.load_state_dict(state)
    fresh = TrainLoader(source(shards), RECIPE, steps=6, progress=lambda: (4, 22))
    assert keys(loader) == keys(fresh)


def test_resume_under_another_layout_is_said_and_starts_afresh(shards, caplog):
    state = {"start": [0, 0], "done": 2, "read": [4, 4, 4, 4], "layout": [8, 4, 4, 6, 0]}
    loader = TrainLoader(source(shards), RECIPE, steps=6)
    loader.load_state_dict(state)
    assert "drawn anew" in caplog.text and len(list(loader)) == 6


def test_torchs_random_state_is_left_alone(shards):
    before = torch.get_rng_state()
    keys(TrainLoader(source(shards), RECIPE, steps=2, workers=1))
    keys(EvalLoader(source(shards), RECIPE))
    assert torch.equal(before, torch.get_rng_state())


# ---- what may be in a shard


def one(tmp_path, members, recipe=LENIENT, **options):
    loader = EvalLoader(source([str(write_tar(tmp_path / "x.tar", members))], **options), recipe)
    return list(loader), loader.tally


def test_labels_are_optional_and_come_from_cls_or_json(tmp_path):
    picture = encode(plain(1))
    batches, tally = one(
        tmp_path,
        [
            ("a.png", picture),
            ("b.png", picture), ("b.cls", b" 12\n"),
            ("c.json", json.dumps({"label": 5}).encode()), ("c.png", picture),
            ("d.PNG", picture), ("d.json", b"{}"),
        ],
    )  # fmt: skip
    assert batches[0]["label"].tolist() == [-1, 12, 5, -1] and tally.bad == 0
    for wrong in (b"cat", b"-2", b"9" * 30, b"\xff"):
        _, tally = one(tmp_path, [("a.png", picture), ("b.png", picture), ("b.cls", wrong)])
        assert tally.bad == 1
    for wrong in (b"[" * 100_000, b"{", b'{"label": "x"}', b'{"label": 1e999}'):
        _, tally = one(tmp_path, [("a.png", picture), ("b.png", picture), ("b.json", wrong)])
        assert tally.bad == 1


def test_masks(tmp_path):
    values = plain(0)[..., 0] * 0
    values[:, :6] = 9
    picture, mask = encode(plain(1)), encode(values)
    batches, _ = one(tmp_path, [(f"{k}.{s}", d) for k in "ab" for s, d in (("png", picture), ("mask.png", mask))])
    assert batches[0]["mask"].shape == (2, 1, 8, 8) and batches[0]["mask"].dtype == torch.bool
    assert batches[0]["mask"][0, 0, 0].tolist() == [True] * 4 + [False] * 4
    batches, tally = one(tmp_path, [("a.png", picture), ("b.png", picture), ("b.mask.png", mask)])
    assert "mask" not in batches[0] and tally.bad == 0
    _, tally = one(tmp_path, [("a.png", picture), ("b.png", picture), ("b.mask.png", encode(values[:5]))])
    assert "mask and picture differ in size" in tally.reasons


def test_bad_members_are_skipped_counted_and_told_in_one_line(tmp_path, caplog):
    good = encode(plain(1), "JPEG")
    members = [(f"good{n}.jpg", good) for n in range(9)]
    members += [
        ("empty.jpg", b""),
        ("cut.jpg", good[: len(good) // 2]),
        ("text.jpg", b"<html>404</html>"),
        ("pixel.png", encode(plain(1, (1, 1)))),
        ("named.cls", b"1"),
        ("wrong.jpg", good), ("wrong.cls", b"cat"),
    ]  # fmt: skip
    batches, tally = one(tmp_path, members)
    assert sum(len(batch["key"]) for batch in batches) == 9
    assert (tally.seen, tally.bad) == (15, 6)
    assert len(caplog.records) == 1 and "6 of 15" in caplog.text and "empty file" in caplog.text


def test_too_many_bad_members_stop_the_run(tmp_path):
    good = encode(plain(1))
    members = [(f"s{n}.png", b"broken" if n % 3 == 0 else good) for n in range(200)]
    shard = str(write_tar(tmp_path / "x.tar", members))
    recipe = Recipe(image_size=(8, 8), batch_size=4, max_bad_rate=0.1)
    for workers in (0, 1):
        seen = 0
        with pytest.raises(BadRateError, match="max_bad_rate=0.1"):
            for batch in TrainLoader(source([shard]), recipe, steps=500, workers=workers):
                seen += len(batch["key"])
        assert 50 < seen < 150  # enough to judge, and no more
    with pytest.raises(BadRateError):  # fewer than enough to judge, judged at the end
        list(EvalLoader(source([str(write_tar(tmp_path / "y.tar", members[:10]))]), recipe))
    with pytest.raises(BadRateError):  # nothing but bad members must not spin for ever
        list(TrainLoader(source([str(write_tar(tmp_path / "z.tar", members[:1]))]), recipe, steps=1))


def test_our_bugs_are_not_data_errors(shards, monkeypatch):
    monkeypatch.setattr("aha.data.pipeline.read_sized", lambda *a, **k: len(None))
    with pytest.raises(TypeError):
        list(EvalLoader(source(shards), LENIENT))


@pytest.mark.parametrize(
    ("cut", "whole"),
    [
        (512 + 100, 0),  # within the first member's data
        (2048 + 300, 1),  # within a header: the second sample might have had a label to come
        (2048, 1),  # between two members, where tarfile itself sees nothing wrong
        (2048 + 512 + 30, 2),  # within data
    ],
)
def test_a_truncated_tar_gives_its_whole_samples_and_one_bad_one(tmp_path, cut, whole):
    member = encode(plain(1))  # header and data fill 512 bytes each
    path = write_tar(tmp_path / "x.tar", [(f"s{n}.png", member) for n in range(6)])
    path.write_bytes(path.read_bytes()[:cut])
    loader = EvalLoader(source([str(path)]), Recipe(image_size=(8, 8), batch_size=4, max_bad_rate=1.0))
    assert keys(loader) == [f"s{n}" for n in range(whole)]
    assert loader.tally.bad == 1


@pytest.mark.parametrize("content", [b"", b"not a tar" * 300])
def test_what_is_no_tar_counts_as_one_bad_sample(tmp_path, shards, content):
    (tmp_path / "x.tar").write_bytes(content)
    loader = EvalLoader(source([*shards, str(tmp_path / "x.tar")]), LENIENT)
    assert sorted(keys(loader)) == EXPECTED and loader.tally.bad == 1


def test_a_training_source_without_samples_stops(tmp_path):
    with pytest.raises(ShardSourceError, match="held no sample"):
        list(TrainLoader(source([str(write_tar(tmp_path / "x.tar", [("README.md", b"hello")]))]), LENIENT, steps=1))


def test_repeated_keys_and_unicode(tmp_path):
    a, b = encode(plain(1)), encode(plain(2))
    batches, tally = one(
        tmp_path, [("ü/猫.png", a), ("ü/猫.cls", b"1"), ("ü/猫.png", b), ("ü/猫.cls", b"2"), ("ü/猫.cls", b"3")]
    )
    assert batches[0]["key"] == ["ü/猫"] * 2 and batches[0]["label"].tolist() == [1, 2]
    assert batches[0]["image"][:, 0, 0, 0].tolist() == [1, 2] and tally.bad == 1  # the stray label


# ---- security


class _Bomb:
    def __reduce__(self):
        return (open, ("/tmp/aha-test-was-here", "w"))


def test_no_pickle_is_opened_and_no_name_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(pickle, "loads", lambda *a, **k: pytest.fail("unpickled"))
    bomb, picture = pickle.dumps(_Bomb(), 0), encode(plain(1))
    before = set(tmp_path.parent.rglob("*"))
    batches, tally = one(
        tmp_path,
        [
            ("a.png", picture), ("a.pyd", bomb), ("a.pkl", bomb), ("a.pth", bomb), ("a.pickle", bomb),
            ("../../escape.png", picture), ("/abs.png", picture), ("b.jpg", bomb),
        ],
    )  # fmt: skip
    assert batches[0]["key"] == ["a", "../../escape", "/abs"] and tally.bad == 1
    assert set(tmp_path.parent.rglob("*")) - before <= {tmp_path / "x.tar"}


def test_oversized_members_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("aha.data.shards.MAX_MEMBER", 2000)
    batches, tally = one(tmp_path, [("a.png", bytes(5000)), ("b.png", encode(plain(1)))])
    assert batches[0]["key"] == ["b"] and "above the limit" in str(tally)


def test_pipe_only_on_request(shards, tmp_path):
    mark = tmp_path / "ran"
    command = f"pipe:touch {mark}; cat {shards[0]}"
    for evil in (command, " PIPE:" + command[5:]):
        with pytest.raises(ValueError, match="allow_pipe"):
            expand_urls(evil)
        with pytest.raises(ShardSourceError, match="allow_pipe"):
            list(source([evil]).read(evil))
    assert not mark.exists()
    assert expand_urls(command, allow_pipe=True) == [command]
    assert len(keys(EvalLoader(source([command], allow_pipe=True), RECIPE))) == 5 and mark.exists()
    with pytest.raises(ShardSourceError, match="gave up"):
        list(source(["x"], allow_pipe=True).read(f"pipe:cat {shards[0]}; exit 3"))


def test_rewriting_by_environment_is_ignored(shards, monkeypatch):
    monkeypatch.setenv("GOPEN_REWRITE", f"{shards[0]}=pipe:false")
    assert len(keys(EvalLoader(source(shards[:1]), RECIPE))) == 5


# ---- addresses and failing sources


def test_addresses(shards, tmp_path):
    folder = shards[0].rsplit("/", 1)[0]
    assert expand_urls(folder) == expand_urls(f"{folder}/*.tar") == expand_urls(f"{folder}/part-{{000..006}}.tar")
    assert expand_urls([f"{folder}/part-00[01].tar", f"file://{shards[2]}"]) == shards[:3]
    assert expand_urls("hf://datasets/a/b/x-{0..2}.tar")[2] == "hf://datasets/a/b/x-2.tar"
    assert expand_urls("https://host/x-{00..01}.tar") == ["https://host/x-00.tar", "https://host/x-01.tar"]
    for wrong, reason in ((f"{tmp_path}/none.tar", "no shard"), (str(tmp_path), "no shard"), ([], "no shards")):
        with pytest.raises(ValueError, match=reason):
            expand_urls(wrong)
    with pytest.raises(ValueError, match="twice"):
        expand_urls([shards[0], shards[0]])


def test_fsspec_serves_the_rest(shards):
    with fsspec.open("memory://bucket/part-0.tar", "wb") as stream, open(shards[0], "rb") as local:
        stream.write(local.read())
    assert [url.rsplit("/", 1)[1] for url in expand_urls("memory://bucket/*.tar")] == ["part-0.tar"]
    assert len(keys(EvalLoader(source(expand_urls("memory://bucket/*.tar")), RECIPE))) == 5
    with pytest.raises(ShardSourceError, match="nosuchscheme"):
        list(source(["x"]).read("nosuchscheme://a.tar"))


def test_sizes_come_from_the_info_beside_the_shards(tmp_path):
    shards = write_shards_of(tmp_path, (2, 3))
    assert info_samples(shards) is None
    info = {"splits": {"train": {"filenames": ["part-000.tar", "part-001.tar"], "shard_lengths": [2, 3]}}}
    (tmp_path / "_info.json").write_text(json.dumps(info))
    assert info_samples(shards) == 5 and info_samples(shards[1:]) == 3
    assert info_samples([*shards, str(tmp_path / "other.tar")]) is None
    (tmp_path / "_info.json").write_text("[]")
    with pytest.raises(ValueError, match="layout"):
        info_samples(shards)


class _Flaky(http.server.BaseHTTPRequestHandler):
    """Serves files; the first answers break off or say 503."""

    faults: list[str] = []

    def do_GET(self):
        fault = self.faults.pop(0) if self.faults else ""
        data = open(self.path, "rb").read() if not self.path.endswith("none.tar") else None
        if data is None or fault == "503":
            self.send_error(404 if data is None else 503)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2 + 100] if fault == "cut" else data)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Flaky) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_http_is_retried_and_read_on_from_where_it_broke(shards, server, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    url = server + shards[2]
    _Flaky.faults = ["503", "cut", "503"]
    assert [sample.key for sample in source([url]).read(url)] == [f"s{n:04d}" for n in range(6, 15)]
    _Flaky.faults = ["cut"] * 9
    samples = list(source([url]).read(url))
    assert 0 < len(samples) < 9 and samples[-1].error is not None  # cut at the same place each time: damaged
    _Flaky.faults = ["503"] * 9
    with pytest.raises(ShardSourceError, match="gave up .* 2 retries.*Checkpoints are kept"):
        list(source([url]).read(url))
    _Flaky.faults = []
    with pytest.raises(ShardSourceError, match="404"):
        list(source(["x"]).read(server + "/none.tar"))


def test_a_dead_source_stops_the_loader_clearly(tmp_path):
    shards = write_shards_of(tmp_path, (2,))
    loader = TrainLoader(source(shards), RECIPE, steps=3, workers=1)
    (tmp_path / "part-000.tar").unlink()
    with pytest.raises(ShardSourceError, match="gave up"):
        list(loader)
