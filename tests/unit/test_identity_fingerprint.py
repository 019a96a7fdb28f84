"""Weights fingerprints: every byte counts, and a remembered one is never stale."""

from __future__ import annotations

import errno
import json
import logging
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lmcache_core.errors import UnsupportedModel
from lmcache_core.identity import fingerprint, parameters_fingerprint, weights_fingerprint

LATER_NS = 1 << 62
"""A clock reading long after any file of these tests was written."""


def safetensors(payload: bytes) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(payload)], "data_offsets": [0, len(payload)]}})
    return struct.pack("<Q", len(header)) + header.encode() + payload


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    payload = bytes(range(256)) * 12_000  # about 3 blocks, the last one short
    (folder / "model-00001-of-00002.safetensors").write_bytes(safetensors(payload))
    (folder / "model-00002-of-00002.safetensors").write_bytes(safetensors(payload[::-1]))
    (folder / "config.json").write_text("{}")
    return folder


def flip(file: Path, offset: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ 1]))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each block that is read from a file."""
    starts: list[int] = []
    real = fingerprint._file_block_digest

    def counting(descriptor: int, start: int, nbytes: int, scratch: object) -> bytes:
        starts.append(start)
        return real(descriptor, start, nbytes, scratch)  # type: ignore[arg-type]

    monkeypatch.setattr(fingerprint, "_file_block_digest", counting)
    return starts


def test_fingerprints_never_change(model: Path) -> None:
    assert weights_fingerprint(model) == "9f6c1ecce99701cd5bcc0e4313dbd66195c9543159f02cd767d39184ed5fad47"
    assert (
        weights_fingerprint(model / "config.json")
        == "62a104766dd758c7c35a159c3dc979fc28cfa3df06e6a2f1198e9e0237944f15"
    )
    tensors = [("b", "uint8", (3,), b"abc"), ("a", "float32", (), bytes(4))]
    assert (
        parameters_fingerprint(tensors) == "d19d380811962748730d645aac32ed9193d7ccff7633980e9ab39ff945389dcd"
    )


@pytest.mark.parametrize("offset", [200, 4096, (1 << 20) - 1, 1 << 20, 2_999_999, -1])
def test_models_that_differ_in_one_tensor_byte_are_told_apart(model: Path, offset: int) -> None:
    shard = model / "model-00002-of-00002.safetensors"
    before = weights_fingerprint(model)
    flip(shard, offset % shard.stat().st_size)
    assert weights_fingerprint(model) != before


def test_blocks_that_change_places_are_told_apart(tmp_path: Path) -> None:
    a, b = bytes(1 << 20), b"\x01" * (1 << 20)
    (tmp_path / "a.bin").write_bytes(a + b)
    (tmp_path / "b.bin").write_bytes(b + a)
    assert weights_fingerprint(tmp_path / "a.bin") != weights_fingerprint(tmp_path / "b.bin")


def test_where_a_model_lies_does_not_matter(model: Path, tmp_path: Path) -> None:
    before = weights_fingerprint(model)
    (model / "README.md").write_text("new")
    assert weights_fingerprint(model.rename(tmp_path / "moved")) == before
    single = tmp_path / "one.gguf"
    single.write_bytes(b"weights")
    before = weights_fingerprint(single)
    assert weights_fingerprint(single.rename(tmp_path / "other.gguf")) == before


def test_shards_that_change_names_are_told_apart(model: Path) -> None:
    before = weights_fingerprint(model)
    first, second = sorted(model.glob("*.safetensors"))
    first.rename(model / "kept")
    second.rename(first)
    (model / "kept").rename(second)
    assert weights_fingerprint(model) != before


def test_the_index_that_says_which_shard_a_tensor_is_from_counts(model: Path) -> None:
    index = model / "model.safetensors.index.json"
    found = {weights_fingerprint(model)}
    for shard in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        index.write_text(json.dumps({"weight_map": {"w": shard}}))
        found.add(weights_fingerprint(model))
    assert len(found) == 3


def test_shards_are_read_through_links_and_folders(model: Path, tmp_path: Path) -> None:
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for shard in model.glob("*.safetensors"):
        (linked / shard.name).symlink_to(shard)
    assert weights_fingerprint(linked) == weights_fingerprint(model)
    (linked / "more").symlink_to(model)
    assert weights_fingerprint(linked) != weights_fingerprint(model)


def test_a_link_back_up_and_a_hidden_folder_are_passed_over(model: Path) -> None:
    before = weights_fingerprint(model)
    (model / "loop").symlink_to(model)
    (model / ".cache").mkdir()
    (model / ".cache" / "half.safetensors").write_bytes(b"x")
    assert weights_fingerprint(model) == before


def test_an_empty_weight_file_counts(model: Path) -> None:
    before = weights_fingerprint(model)
    (model / "empty.bin").touch()
    assert weights_fingerprint(model) != before


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="no weight file below"):
        weights_fingerprint(tmp_path)


def test_a_path_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        weights_fingerprint(tmp_path / "missing.gguf")


@pytest.mark.parametrize("change", ["truncate", "overwrite", "replace"])
def test_a_file_that_changes_while_it_is_read_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    file = model / "model-00001-of-00002.safetensors"
    real = fingerprint._file_block_digest

    def meddling(descriptor: int, start: int, nbytes: int, scratch: object) -> bytes:
        digest = real(descriptor, start, nbytes, scratch)  # type: ignore[arg-type]
        if start == 0 and change == "truncate":
            os.truncate(file, 1 << 20)
        elif start == 0 and change == "overwrite":
            flip(file, 500)
            os.utime(file, ns=(0, 0))
        elif start == 0:
            (model / "new").write_bytes(file.read_bytes())
            (model / "new").replace(file)
        return digest

    monkeypatch.setattr(fingerprint, "_file_block_digest", meddling)
    with pytest.raises(UnsupportedModel, match="changed while it was read"):
        weights_fingerprint(file)


def test_a_read_error_is_raised_and_leaves_no_descriptor_open(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> bytes:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(fingerprint, "_file_block_digest", failing)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="input/output"):
        weights_fingerprint(model)
    assert os.listdir("/proc/self/fd") == before


def test_a_remembered_fingerprint_reads_no_weights(model: Path, tmp_path: Path, reads: list[int]) -> None:
    cache = tmp_path / "cache"
    first = weights_fingerprint(model, cache_dir=cache, clock_ns=lambda: LATER_NS)
    assert reads
    reads.clear()
    assert (
        weights_fingerprint(model, cache_dir=cache)
        == first
        == weights_fingerprint(model.resolve(), cache_dir=cache)
    )
    assert not reads
    assert cache.stat().st_mode & 0o777 == 0o700


def test_a_byte_changed_in_place_with_its_old_time_put_back_is_noticed(model: Path, tmp_path: Path) -> None:
    shard, cache = model / "model-00001-of-00002.safetensors", tmp_path / "cache"
    before, status = weights_fingerprint(model, cache_dir=cache, clock_ns=lambda: LATER_NS), shard.stat()
    flip(shard, 1000)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert shard.stat().st_mtime_ns == status.st_mtime_ns
    assert weights_fingerprint(model, cache_dir=cache) not in {before}
    assert weights_fingerprint(model, cache_dir=cache) == weights_fingerprint(model)


def test_a_file_written_just_now_is_not_remembered(model: Path, tmp_path: Path) -> None:
    newest = max(file.stat().st_ctime_ns for file in model.iterdir())
    weights_fingerprint(model, cache_dir=tmp_path / "cache", clock_ns=lambda: newest + 1)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "damage", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"digest": "00", "check": ""}']
)
def test_a_damaged_cache_entry_is_replaced(
    model: Path, tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    first = weights_fingerprint(model, cache_dir=cache, clock_ns=lambda: LATER_NS)
    entries = {entry: entry.read_bytes() for entry in cache.iterdir()}
    for entry in entries:
        entry.write_bytes(damage)
    assert weights_fingerprint(model, cache_dir=cache, clock_ns=lambda: LATER_NS) == first
    assert {entry: entry.read_bytes() for entry in cache.iterdir()} == entries


def test_a_flipped_digit_in_a_cache_entry_is_a_miss(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = weights_fingerprint(model, cache_dir=cache, clock_ns=lambda: LATER_NS)
    for path in cache.iterdir():
        entry = json.loads(path.read_bytes())
        entry["digest"] = f"{int(entry['digest'], 16) ^ 1:064x}"
        path.write_text(json.dumps(entry))
    assert weights_fingerprint(model, cache_dir=cache) == first


def test_a_cache_that_cannot_be_written_is_done_without(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        remembered = weights_fingerprint(model, cache_dir=tmp_path / "file" / "c", clock_ns=lambda: LATER_NS)
    assert remembered == weights_fingerprint(model)
    assert "can't be remembered" in caplog.text


def parameters(**changed: np.ndarray) -> Iterator[tuple[str, str, tuple[int, ...], np.ndarray]]:
    arrays = {
        "embed": np.arange(700_000, dtype=np.float32).reshape(700, 1000),
        "norm": np.ones(5, dtype=np.float32),
        "empty": np.zeros((0, 4), dtype=np.float32),
    }
    for name, array in {**arrays, **changed}.items():
        yield name, str(array.dtype), array.shape, array


def test_loaded_parameters_are_told_apart_by_every_byte() -> None:
    changed = np.arange(700_000, dtype=np.float32).reshape(700, 1000)
    changed.view(np.uint8)[699, 3999] ^= 1
    assert parameters_fingerprint(parameters(embed=changed)) != parameters_fingerprint(parameters())


def test_the_order_of_the_parameters_does_not_matter() -> None:
    assert parameters_fingerprint(reversed([*parameters()])) == parameters_fingerprint(parameters())


@pytest.mark.parametrize(
    "other",
    [
        ("wx", "float32", (2,), bytes(8)),
        ("w", "int32", (2,), bytes(8)),
        ("w", "float32", (1, 2), bytes(8)),
        ("w", "float32", (2,), bytes(9)),
    ],
)
def test_name_dtype_shape_and_length_are_in_the_fingerprint(
    other: tuple[str, str, tuple[int, ...], bytes],
) -> None:
    assert parameters_fingerprint([other]) != parameters_fingerprint([("w", "float32", (2,), bytes(8))])


def test_parameters_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="two parameters are called 'w'"):
        parameters_fingerprint([("w", "u8", (1,), b"a"), ("w", "u8", (1,), b"b")])
    with pytest.raises(UnsupportedModel, match="without parameters"):
        parameters_fingerprint([])


def test_a_strided_parameter_is_refused() -> None:
    with pytest.raises(TypeError, match="'w' is not C-contiguous"):
        parameters_fingerprint([("w", "float32", (2,), np.zeros(4, dtype=np.float32)[::2])])


def test_lazy_parameters_are_let_go_as_they_are_hashed() -> None:
    alive: list[int] = []
    most = 0

    class Loud(np.ndarray):
        def __del__(self) -> None:
            alive.pop()

    def lazy() -> Iterator[tuple[str, str, tuple[int, ...], np.ndarray]]:
        nonlocal most
        for i in range(300):
            alive.append(i)
            most = max(most, len(alive))
            yield f"p{i}", "uint8", (8,), np.zeros(8, dtype=np.uint8).view(Loud)

    parameters_fingerprint(lazy())
    assert most <= fingerprint._num_threads() * (fingerprint.BLOCKS_AHEAD + 1) + 2
