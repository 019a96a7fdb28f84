"""Fingerprints of weights: every byte counts, because two models can differ in one (docs/adr/0002).

A file or tensor is hashed as the BLAKE2b-256 of the BLAKE2b-256s of its 1 MiB blocks, so that all
CPUs work on it: hashlib lets go of the GIL.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TypeAlias

from lmcache_core.errors import UnsupportedModel
from lmcache_core.identity.encoding import Value, encode
from lmcache_core.identity.tokens import Memory

log = logging.getLogger(__name__)

BLOCK_NBYTES = 1 << 20
MAX_THREADS = 32
BLOCKS_AHEAD = 4
"""Blocks queued for each thread: bounds what a lazily copied tensor keeps alive."""

SETTLED_NS = 2_000_000_000
"""A file changed more recently may change again without its timestamps showing it: not cached."""

WEIGHT_SUFFIXES = (
    *(".safetensors", ".gguf", ".ggml", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".npy", ".h5", ".msgpack"),
    *(".onnx", ".onnx_data", ".tensors", ".tflite", ".pdparams"),
    ".index.json",  # says which shard a tensor is taken from
)

_Block: TypeAlias = Callable[[], bytes]
"""Returns the digest of one block; runs on a pool thread."""


def weights_fingerprint(
    path: Path, *, cache_dir: Path | None = None, clock_ns: Callable[[], int] = time.time_ns
) -> str:
    """The fingerprint, 64 hex digits, of the weight file `path`, or of every weight file below it.

    Reads every byte, and blocks meanwhile. The name of a single file doesn't count; the names of
    several (relative to `path`) do, since they say which of them a loader takes. With `cache_dir` a
    file's digest is remembered by path, size, inode, modification and change time; a cache that can't
    be used is logged and done without.

    Raises:
        UnsupportedModel: no weight file there, or one changed while it was read.
        OSError: a file can't be read.
    """
    if path.is_dir():
        files = sorted(_weight_files(path, "", frozenset()))
        if not files:
            raise UnsupportedModel(f"no weight file below {path} (looked for {', '.join(WEIGHT_SUFFIXES)})")
    else:
        files = [("", path)]
    cache = _Cache(cache_dir) if cache_dir is not None else None
    with _pool() as pool:
        named = [[os.fsencode(name), _file_digest(file, pool, cache, clock_ns)] for name, file in files]
    return blake2b(encode(named), digest_size=32, person=b"lmcache-core f1").hexdigest()


def parameters_fingerprint(tensors: Iterable[tuple[str, str, Sequence[int], Memory]]) -> str:
    """The fingerprint, 64 hex digits, of loaded parameters and buffers: (name, dtype, shape, bytes).

    The order doesn't matter. `tensors` may be lazy (copied from a device one by one): it is iterated
    on this thread, and only a few blocks' buffers are held at a time. Every byte is read.

    Raises:
        UnsupportedModel: there are none, or two have the same name.
        TypeError: a buffer isn't C-contiguous, or isn't one.
    """
    described: dict[str, tuple[str, list[int], int]] = {}

    def blocks() -> Iterator[_Block]:
        for name, dtype, shape, buffer in tensors:
            if name in described:
                raise UnsupportedModel(f"two parameters are called {name!r}: neither can be told apart")
            memory = memoryview(buffer)  # type: ignore[arg-type]
            if not memory.c_contiguous:
                raise TypeError(f"the buffer of {name!r} is not C-contiguous")
            described[name] = (dtype, [int(length) for length in shape], memory.nbytes)
            if memory.nbytes:
                flat = memory.cast("B")
                for start in range(0, memory.nbytes, BLOCK_NBYTES):
                    yield partial(_block_digest, flat[start : start + BLOCK_NBYTES])

    with _pool() as pool:
        leaves = list(_in_order(blocks(), pool))
    if not described:
        raise UnsupportedModel("a model without parameters has no fingerprint")
    taken = iter(leaves)
    trees: dict[str, Value] = {
        name: [dtype, shape, _tree_digest(nbytes, taken)]
        for name, (dtype, shape, nbytes) in described.items()
    }
    return blake2b(encode(trees), digest_size=32, person=b"lmcache-core f2").hexdigest()


def _weight_files(folder: Path, prefix: str, above: frozenset[tuple[int, int]]) -> Iterator[tuple[str, Path]]:
    """(name relative to the top, file). Links are followed, as loaders do, except back up; hidden
    directories (a download's `.cache`) are passed over."""
    status = folder.stat()
    place = (status.st_dev, status.st_ino)
    if place in above:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            name = prefix + entry.name
            if entry.is_dir():
                if not entry.name.startswith("."):
                    yield from _weight_files(Path(entry.path), name + "/", above | {place})
            elif entry.name.lower().endswith(WEIGHT_SUFFIXES):
                yield name, Path(entry.path)


def _file_digest(
    path: Path, pool: ThreadPoolExecutor, cache: _Cache | None, clock_ns: Callable[[], int]
) -> bytes:
    started_ns = clock_ns()
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        before = os.fstat(descriptor)
        if cache is not None and (known := cache.get(path, before)) is not None:
            return known
        scratch = threading.local()
        blocks = (
            partial(_file_block_digest, descriptor, start, min(BLOCK_NBYTES, before.st_size - start), scratch)
            for start in range(0, before.st_size, BLOCK_NBYTES)
        )
        leaves = list(_in_order(blocks, pool))
    finally:
        os.close(descriptor)  # no block runs any more: `_in_order` waits for those it started
    if b"" in leaves or _state(os.stat(path)) != _state(before):
        raise UnsupportedModel(f"{path} changed while it was read: try again when it is complete")
    digest = _tree_digest(before.st_size, iter(leaves))
    if cache is not None and started_ns - before.st_ctime_ns >= SETTLED_NS:
        cache.put(path, before, digest)
    return digest


def _file_block_digest(descriptor: int, start: int, nbytes: int, scratch: threading.local) -> bytes:
    """The digest of one block of a file; empty when the file ends before it does."""
    buffer: bytearray | None = getattr(scratch, "buffer", None)
    if buffer is None:
        buffer = scratch.buffer = bytearray(BLOCK_NBYTES)
    memory, have = memoryview(buffer)[:nbytes], 0
    while have < nbytes:
        got = os.preadv(descriptor, [memory[have:]], start + have)
        if not got:
            return b""
        have += got
    return _block_digest(memory)


def _block_digest(memory: memoryview) -> bytes:
    return blake2b(memory, digest_size=32, person=b"lmcache-core b1").digest()


def _tree_digest(nbytes: int, leaves: Iterator[bytes]) -> bytes:
    """The digest of `nbytes` bytes from their blocks' digests, which it takes from `leaves`."""
    count = -(-nbytes // BLOCK_NBYTES)
    joined = b"".join(next(leaves) for _ in range(count))
    return blake2b(encode([nbytes, joined]), digest_size=32, person=b"lmcache-core b2").digest()


def _num_threads() -> int:
    return min(len(os.sched_getaffinity(0)), MAX_THREADS)


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_num_threads(), thread_name_prefix="lmcache-fingerprint")


def _in_order(blocks: Iterable[_Block], pool: ThreadPoolExecutor) -> Iterator[bytes]:
    """The blocks' digests, a bounded number of them being worked on at once. None runs on after it ends."""
    waiting: deque[Future[bytes]] = deque()
    limit = _num_threads() * BLOCKS_AHEAD
    try:
        for block in blocks:
            waiting.append(pool.submit(block))
            if len(waiting) >= limit:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            if not future.cancel():
                future.exception()


def _state(status: os.stat_result) -> list[int]:
    """What changes when a file does. The change time can't be set back, unlike the modification time."""
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


class _Cache:
    """File digests by path and state, one small file each. Anything wrong with an entry is a miss."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, path: Path, status: os.stat_result) -> bytes | None:
        place = self._place(path)
        try:
            entry = json.loads(place.read_bytes())
            digest = bytes.fromhex(entry["digest"])
            if entry["check"] == self._check(path, status, digest):
                return digest
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            log.warning("fingerprint cache entry %s is unusable and will be replaced: %s", place, error)
        return None

    def put(self, path: Path, status: os.stat_result, digest: bytes) -> None:
        place = self._place(path)
        entry = {
            "path": os.fsencode(path).decode(errors="replace"),
            "digest": digest.hex(),
            "check": self._check(path, status, digest),
        }
        unfinished = place.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(entry, indent=2))
            os.replace(unfinished, place)
        except OSError as error:
            log.warning("the fingerprint of %s can't be remembered: %s", path, error)

    def _place(self, path: Path) -> Path:
        name = blake2b(os.fsencode(os.path.realpath(path)), digest_size=32).hexdigest()
        return self._folder / f"{name}.json"

    def _check(self, path: Path, status: os.stat_result, digest: bytes) -> str:
        """Binds the digest to the file's path and state, and shows a damaged entry."""
        entry = encode([os.fsencode(os.path.realpath(path)), _state(status), digest])
        return blake2b(entry, digest_size=32, person=b"lmcache-core f3").hexdigest()
