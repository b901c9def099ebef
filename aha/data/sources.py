"""Shard addresses: expanding them, opening them, and the sizes that stand beside them in ``_info.json``."""

from __future__ import annotations

import glob
import http.client
import json
import tarfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlparse
from urllib.request import url2pathname

import fsspec
from braceexpand import braceexpand
from webdataset.gopen import gopen_pipe

TIMEOUT = 60.0  # seconds without a byte before an http source counts as dead
INFO_NAMES = ("_info.json", "info.json")
_PERMANENT = (400, 401, 403, 404, 410)


class ShardSourceError(RuntimeError):
    """A source of shards that stays unreachable or holds nothing: training stops, checkpoints stay."""


def expand_urls(urls: str | Sequence[str], *, allow_pipe: bool = False) -> list[str]:
    """Brace patterns, globs, folders of ``.tar`` files, or lists of these, to a plain list of shards.

    Args:
        urls: ``train-{0000..0127}.tar``, ``shards/*.tar``, a folder, ``hf://…``, ``https://…``, ``s3://…``, …
        allow_pipe: permit ``pipe:`` addresses, which run a shell command.

    Raises:
        ValueError: for a ``pipe:`` address without ``allow_pipe``, a pattern or path that names nothing, or a shard
            that is named twice (its samples would be counted twice).
    """
    shards: list[str] = []
    for pattern in [urls] if isinstance(urls, str) else urls:
        for url in braceexpand(str(pattern)):
            if _is_pipe(url) and not allow_pipe:
                msg = f"{url!r} would run a shell command; pass allow_pipe=True if you trust where it comes from."
                raise ValueError(msg)
            shards.extend([url] if _is_pipe(url) else _match(url))
    twice = sorted({shard for shard in shards if shards.count(shard) > 1}) if len(set(shards)) < len(shards) else []
    if twice or not shards:
        msg = f"these shards are named twice: {twice}" if twice else f"no shards in {urls!r}: give at least one"
        raise ValueError(msg)
    return shards


def _is_pipe(url: str) -> bool:
    return url.strip().lower().startswith("pipe:")


def is_local(url: str) -> bool:
    """Whether an address is a path on this machine."""
    return not _is_pipe(url) and urlparse(url).scheme in ("", "file") or (len(urlparse(url).scheme) == 1)  # C:\…


def local_path(url: str) -> Path:
    """The path of a local address."""
    return Path(url2pathname(urlparse(url).path)) if url.startswith("file:") else Path(url).expanduser()


def _match(url: str) -> list[str]:
    wild = glob.has_magic(url) and not url.startswith(("http:", "https:"))
    if is_local(url):
        path = local_path(url)
        if path.is_dir():
            found = sorted(str(shard) for shard in path.glob("*.tar"))
        elif path.is_file():
            found = [str(path)]
        else:
            found = sorted(glob.glob(str(path))) if wild else []
        if not found:
            msg = f"no shard at {url!r}; expected a .tar file, a folder of them, or a pattern such as shards/*.tar."
            raise ValueError(msg)
        return found
    if not wild:
        return [url]
    system, path = fsspec.core.url_to_fs(url)
    found = sorted(system.unstrip_protocol(name) for name in system.glob(path))
    if not found:
        msg = f"the pattern {url!r} matches nothing."
        raise ValueError(msg)
    return found


def open_url(url: str, *, allow_pipe: bool = False) -> BinaryIO:
    """Open a shard for reading from start to end.

    Local files directly, http(s) by the standard library, ``pipe:`` by webdataset (if allowed), the rest (``hf://``,
    ``s3://``, ``gs://``, …) by fsspec.

    Raises:
        OSError: if the source can't be opened now; another attempt may succeed.
        ShardSourceError: if another attempt is pointless (not found, not permitted, no such protocol).
    """
    scheme = urlparse(url).scheme
    if _is_pipe(url):
        if not allow_pipe:
            msg = f"{url!r} would run a shell command; pass allow_pipe=True if you trust where it comes from."
            raise ShardSourceError(msg)
        return gopen_pipe(url.strip())
    if is_local(url):
        return local_path(url).open("rb")
    if scheme in ("http", "https"):
        try:
            return urllib.request.urlopen(url, timeout=TIMEOUT)  # noqa: S310 (scheme checked above)
        except urllib.error.HTTPError as error:
            if error.code not in _PERMANENT:
                raise
            msg = f"{url}: HTTP {error.code} {error.reason}. Check the address and the permission to read it."
            raise ShardSourceError(msg) from error
    try:
        system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        msg = f"{url}: {error}. Install the fsspec back-end for {scheme}://."
        raise ShardSourceError(msg) from error
    try:
        return system.open(path, "rb")
    except (FileNotFoundError, PermissionError) as error:
        msg = f"{url}: {error}. Check the address and the permission to read it."
        raise ShardSourceError(msg) from error
    except (OSError, TypeError):
        raise
    except Exception as error:  # each back-end has its own exceptions
        msg = f"{type(error).__name__}: {error}"
        raise OSError(msg) from error


class Tail:
    """A stream that remembers its last bytes, and whose every failure is an ``OSError``."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.last = b""

    def read(self, count: int) -> bytes:
        try:
            data = self._stream.read(count)
        except (OSError, TypeError):
            raise
        except (Exception, http.client.HTTPException) as error:  # each fsspec back-end has its own exceptions
            msg = f"{type(error).__name__}: {error}"
            raise OSError(msg) from error
        if data:
            self.last = (self.last + data)[-tarfile.BLOCKSIZE :]
        return data


def info_samples(shards: Sequence[str], *, allow_pipe: bool = False) -> int | None:
    """Number of samples in ``shards`` by the ``_info.json`` beside them (the layout of timm's readers).

    Returns:
        The sum over exactly these shards, or ``None`` if there is no such file or it doesn't list all of them.
    """
    if any(_is_pipe(shard) for shard in shards):
        return None
    total = 0
    lengths: dict[str, dict[str, int]] = {}
    for shard in shards:
        folder, _, name = shard.replace("\\", "/").rpartition("/")
        if folder not in lengths:
            lengths[folder] = _shard_lengths(f"{folder}/" if folder else "", allow_pipe)
        if name not in lengths[folder]:
            return None
        total += lengths[folder][name]
    return total


def _shard_lengths(folder: str, allow_pipe: bool) -> dict[str, int]:
    for name in INFO_NAMES:
        try:
            with open_url(folder + name, allow_pipe=allow_pipe) as stream:
                splits = json.load(stream).get("splits", {}).values()
            return {
                file: int(n)
                for split in splits
                for file, n in zip(split["filenames"], split["shard_lengths"], strict=True)
            }
        except (OSError, ShardSourceError):
            continue
        except (ValueError, KeyError, AttributeError) as error:
            msg = (
                f"{folder}{name} is not in the layout of timm's shard readers ({error!r}); give the number of samples."
            )
            raise ValueError(msg) from error
    return {}
