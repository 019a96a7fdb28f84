"""vLLM: what `explain` reads in its log."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.connectors.vllm import known_as
from lmcache_core.connectors.vllm.groups import Group
from lmcache_core.connectors.vllm.known_as import (
    KnownAs,
    in_epoch,
    read_log,
    tell_adapter,
    tell_epoch,
    tell_rank,
)
from lmcache_core.errors import ConfigError
from lmcache_core.identity import FieldDifference, ModelRecord, Part

CONFIG = {"rope": {"theta": 1e4, "scale": None}, "layers": ["full", "window"], "tie": True}
MODEL = ModelRecord(weights="w", config=CONFIG, chunk_tokens=256)
PARTS = [
    Part(layers=(0, 2), heads=(0, 2), content_format="test", content_nbytes=8, group="full attention"),
    Part(layers=(0, 4), heads=(0, 2), content_format="test", content_nbytes=8, group="window 512"),
]
GROUPS = [Group(48), Group(128, 512)]


class Log:
    """What vLLM prints, its own prefix in each line."""

    def __init__(self, file: Path, caplog: pytest.LogCaptureFixture) -> None:
        self._file = file
        self._caplog = caplog
        file.touch()

    def print(self, text: str) -> None:
        with self._file.open("a", encoding="utf-8") as out:
            out.write(text)

    def read(self) -> KnownAs:
        for record in self._caplog.records:
            self.print(f"(Worker_TP0 pid=7) INFO 11-30 09:00:00 [rank.py:1] {record.getMessage()}\n")
        self._caplog.clear()
        return read_log(self._file)


@pytest.fixture
def log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Log:
    caplog.set_level(logging.INFO, "vllm.lmcache_core")
    return Log(tmp_path / "vllm.log", caplog)


def test_what_ranks_say_is_what_is_read(log: Log) -> None:
    log.print("an earlier line\n")
    tell_rank("engine", 0, MODEL, PARTS, GROUPS)
    other = Part(layers=(0, 2), heads=(2, 4), content_format="test", content_nbytes=8)
    tell_rank("engine", 1, MODEL, [other], GROUPS[:1])
    known = log.read()
    assert known.model == MODEL
    assert [part for part, _ in known.ranks[0]] == PARTS
    assert [part for part, _ in known.ranks[1]] == [other]
    [(digest, start)] = known.starts(0).items()
    assert (digest, start(1024)) == (PARTS[1].digest, 512), "a window's part needn't be whole"
    assert known.starts(1) == {}
    assert known.block_tokens == 384


def test_a_later_start_replaces_an_earlier_one_with_all_that_followed_it(log: Log) -> None:
    tell_rank("first", 0, MODEL, PARTS, GROUPS)
    tell_epoch(b"e" * 16)
    tell_adapter("fine", b"f" * 32)
    tell_rank("second", 1, MODEL, PARTS[1:], GROUPS[1:])
    known = log.read()
    assert list(known.ranks) == [1]
    assert [part for part, _ in known.ranks[1]] == PARTS[1:]
    assert known.lora(None) == b""
    with pytest.raises(ConfigError, match=r"no request with adapter 'fine' .*: none"):
        known.lora("fine")


def test_adapters_and_resets_make_other_names_of_the_same_tokens(log: Log) -> None:
    tell_rank("engine", 0, MODEL, PARTS, GROUPS)
    tell_adapter("fine", b"f" * 32)
    assert log.read().lora("fine") == b"f" * 32
    tell_epoch(b"e" * 16)
    known = log.read()
    assert known.lora(None) == in_epoch(b"", b"e" * 16) != b""
    assert known.otherwise("fine", b"salt") == {
        "no lora_request": (in_epoch(b"", b"e" * 16), b"salt"),
        "no cache_salt": (in_epoch(b"f" * 32, b"e" * 16), b""),
        "the epoch before reset 1 of the cache": (b"f" * 32, b"salt"),
    }
    assert known.otherwise(None, b"") == {
        "lora_request 'fine'": (in_epoch(b"f" * 32, b"e" * 16), b""),
        "the epoch before reset 1 of the cache": (b"", b""),
    }


def test_an_adapter_whose_files_were_others_before_is_known_by_the_last(log: Log) -> None:
    tell_rank("engine", 0, MODEL, PARTS, GROUPS)
    tell_adapter("fine", b"f" * 32)
    tell_adapter("fine", b"g" * 32)
    known = log.read()
    assert known.lora("fine") == b"g" * 32
    assert known.otherwise("fine", b"")["other files of lora_request 'fine'"] == (b"f" * 32, b"")


def damaged() -> list[str]:
    line = {
        "type": "rank",
        "engine": "other",
        "rank": 0,
        "model": json.loads(MODEL.to_json()),
        "slices": [],
    }
    piece = {"layers": [2, 2], "heads": [0, 1], "content_format": "x", "content_nbytes": 1, "group": "full"}
    piece |= {"block_tokens": 1, "window": None}
    changed: list[Any] = [
        line | {"model": {}},
        line | {"model": line["model"] | {"chunk_tokens": 0}},
        line | {"slices": [piece]},
        line | {"rank": "0"},
        {"type": "epoch", "epoch": "no hex"},
        {"type": "unknown"},
        [],
    ]
    return [json.dumps(line)[:-20], "", "\x00\xff", "[" * 5000, *map(json.dumps, changed)]


@pytest.mark.parametrize("said", damaged())
def test_lines_that_are_damaged_or_not_ours_are_passed_over(log: Log, said: str) -> None:
    tell_rank("engine", 0, MODEL, PARTS, GROUPS)
    before = log.read()
    log.print(f"INFO {known_as.MARK}{said}\n")
    after = log.read()
    assert (after.model, after.ranks, after.epochs) == (before.model, before.ranks, before.epochs)


def test_a_log_of_something_else_is_an_error_that_says_what_is_needed(log: Log) -> None:
    tell_epoch(b"e")  # of an engine whose start isn't in the file
    with pytest.raises(ConfigError, match="from its start on, at log level INFO"):
        log.read()


def test_a_file_without_lines_ends(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_as, "MAX_LINE_CHARS", 64)
    log.print("x" * 1000 + known_as.MARK)
    with pytest.raises(ConfigError):
        log.read()


@pytest.mark.parametrize(("field", "words"), [("config.compute_dtype", "--dtype"), ("config.rope_theta", "")])
def test_fields_are_named_as_vllm_names_them(field: str, words: str) -> None:
    assert known_as.in_vllm_s_words(FieldDifference(field=field, ours=1, theirs=2)) == words
