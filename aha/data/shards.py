"""Reading tar shards in the layout of timm/imagenet-1k-wds as a stream of raw samples.

A sample is a run of members ``<key>.<suffix>``: one picture (``jpg``, ``jpeg``, ``png`` or ``webp``), and if there is
one a label (``cls``, or ``"label"`` in ``json``) and an object mask (``mask.png``). As in webdataset the key ends at
the first dot of the file name. Other suffixes (``pkl``, ``pyd``, ``npy``, …) are never decoded, and nothing is ever
written to disk, so names such as ``../../x`` have no effect.
"""

from __future__ import annotations

import random
import tarfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import webdataset as wds
from webdataset.tariterators import base_plus_ext

from aha.data.pipeline import RawSample, Slot, stream_seed
from aha.data.sources import ShardSourceError, Tail, is_local, open_url

PICTURES = ("jpg", "jpeg", "png", "webp")
FIELDS = {**dict.fromkeys(PICTURES, "image"), "cls": "label", "json": "info", "mask.png": "mask"}
MAX_MEMBER = 2**28  # bytes; a larger member is skipped unread and its sample counted as bad
EMPTY_SHARDS = 100  # shards in a row without a sample after which a training source counts as dead


class _Truncated(Exception):
    """A tar that ends early: reading on is pointless, what came before is good."""


@dataclass(frozen=True, kw_only=True)
class ShardSource:
    """Tar shards as a source of raw samples.

    Args:
        shards: addresses, already expanded (:func:`aha.data.sources.expand_urls`).
        shuffle_buffer: encoded samples per worker among which training draws the next one.
        retries: attempts after a failure to open or read a shard, before training stops.
        backoff: seconds before the first of these, doubled each time (at most a minute).
        allow_pipe: permit ``pipe:`` addresses.
    """

    shards: tuple[str, ...]
    shuffle_buffer: int = 1000
    retries: int = 6
    backoff: float = 1.0
    allow_pipe: bool = False

    def train(self, position: tuple[int, int, int], slot: Slot, skip: int) -> Iterator[RawSample]:
        """Endless stream of resampled shards, shuffled before decoding, the same for the same arguments."""
        seed = stream_seed(*position, slot.rank, slot.worker)
        samples = wds.shuffle(self.shuffle_buffer, seed=seed, initial=min(100, self.shuffle_buffer))(
            self._resampled(random.Random(seed))
        )
        for _ in range(skip):  # read but not decoded
            next(samples)
        yield from samples

    def _resampled(self, rng: random.Random) -> Iterator[RawSample]:
        empty = 0
        while empty < EMPTY_SHARDS:
            count = 0
            for sample in self.read(rng.choice(self.shards)):
                count += sample.error is None
                yield sample
            empty = 0 if count else empty + 1
        msg = f"{EMPTY_SHARDS} shards in a row held no sample; the first of them all is {self.shards[0]!r}."
        raise ShardSourceError(msg)

    def evaluate(self, slot: Slot) -> Iterator[RawSample]:
        """Every sample exactly once over all slots: shards are strided over the slots; where there are fewer shards
        than slots, the slots that share a shard take its samples in turn."""
        count = len(self.shards)
        for index in range(slot.index % count, count, slot.total):
            sharers = len(range(index, slot.total, count)) if slot.total > count else 1
            turn = slot.index // count if slot.total > count else 0
            for number, sample in enumerate(self.read(self.shards[index])):
                if number % sharers == turn:
                    yield sample

    def read(self, url: str) -> Iterator[RawSample]:
        """The samples of one shard; a failing source is opened anew, after a pause, and read on from where it broke.

        A shard that is damaged (cut off, not a tar) yields its whole samples and then one that carries the error.

        Raises:
            ShardSourceError: if the source stays unreachable.
        """
        delivered, attempt = 0, 0
        while True:
            try:
                with closing(self._members(url)) as samples:
                    for number, sample in enumerate(samples):
                        if number >= delivered:
                            delivered, attempt = number + 1, 0
                            yield sample
                return
            except (tarfile.TarError, _Truncated, EOFError) as error:
                attempt += 1
                if is_local(url) or attempt > self.retries:  # a remote stream may have been cut on its way
                    yield RawSample(key=url, error=f"damaged shard ({error})")
                    return
            except OSError as error:
                attempt += 1
                if attempt > self.retries:
                    msg = (
                        f"gave up on {url!r} after {self.retries} retries: {error}. Checkpoints are kept; resume "
                        "when the source is back."
                    )
                    raise ShardSourceError(msg) from error
            time.sleep(min(60.0, self.backoff * 2 ** (attempt - 1)))

    def _members(self, url: str) -> Iterator[RawSample]:
        """Group the members of one tar; raises ``OSError`` if the source fails and ``_Truncated`` if the tar does."""
        with open_url(url, allow_pipe=self.allow_pipe) as stream:
            tail = Tail(stream)
            sample: RawSample | None = None
            with tarfile.open(fileobj=tail, mode="r|*") as tar:
                for member in tar:
                    tar.members = []  # or a day's worth of headers piles up
                    key, suffix = base_plus_ext(member.name)
                    if not member.isreg() or key is None or key.startswith("__"):
                        continue
                    field = FIELDS.get(suffix.lower())
                    if sample is not None and (key != sample.key or (field and getattr(sample, field) is not None)):
                        yield from _whole(sample)  # a repeated key and suffix starts another sample
                        sample = None
                    sample = sample or RawSample(key=key)
                    if field == "info" and sample.label is not None:
                        continue  # json repeats what cls has told
                    if field and member.size > MAX_MEMBER:
                        sample.error = f"member of {member.size} bytes, above the limit of {MAX_MEMBER}"
                    elif field:
                        data = tar.extractfile(member).read()
                        if len(data) < member.size:
                            msg = f"cut off within {member.name}"
                            raise _Truncated(msg)
                        setattr(sample, field, data)
                compressed = tar.fileobj.comptype != "tar"
            if not compressed and tail.last.strip(b"\0"):
                msg = f"cut off after {sample.key if sample else 'its start'}: no end-of-archive mark"
                raise _Truncated(msg)
            if sample is not None:
                yield from _whole(sample)
            while url.startswith("pipe:") and tail.read(2**20):
                pass  # let the command end by itself


def _whole(sample: RawSample) -> Iterator[RawSample]:
    if sample.error is None and sample.image is None:
        if sample.label is None and sample.info is None and sample.mask is None:
            return  # a stray file, not a sample
        sample.error = f"no picture among its members (looked for {', '.join(PICTURES)})"
    yield sample
