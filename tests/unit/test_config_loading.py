from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_core.config import ByteSize, CacheConfig, Duration, load_config, parse_options
from lmcache_core.config.document import MAX_FILE_BYTES, parse_document, read_document
from lmcache_core.errors import ConfigError

GOOD = """\
chunk_tokens: 128
memory:
  staging: 64MiB
tiers:
  - name: ram
    backend: one
    capacity: 1GiB
  - name: local
    backend: two
    options:
      path: /somewhere
    promote: on_second_hit
    deadline: 250ms
"""


class Password:
    """A plugin's own secret type, as the sdk's `Secret` behaves."""

    def __init__(self, text: str) -> None:
        self.text = text

    @classmethod
    def from_config(cls, value: object) -> Password:
        if not isinstance(value, str):
            raise ValueError("expected text")
        return cls(value)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    path: Annotated[Path, msgspec.Meta(description="Where the files lie.")]
    piece: ByteSize = ByteSize("4MiB")
    wait: Duration = Duration("1s")
    password: Password | None = None
    passwords: list[Password] = []

    def __post_init__(self) -> None:
        if self.piece & (self.piece - 1):
            raise ValueError(f"piece: {self.piece} is not a power of two")


def write(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "cache.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def fault(tmp_path: Path, content: str | bytes) -> str:
    """The message of the one ConfigError that `content` ends in, without the directory."""
    path = write(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return str(caught.value).replace(f"{tmp_path}{os.sep}", "")


def test_a_file_gives_the_tiers_in_its_order_with_values_and_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD))
    assert [tier.name for tier in config.tiers] == ["ram", "local"]
    assert config.chunk_tokens == 128
    assert config.memory.staging == 64 << 20
    assert config.tiers[0].capacity == 1 << 30
    assert config.tiers[1].options == {"path": "/somewhere"}
    assert config.tiers[1].deadline == pytest.approx(0.25)
    assert config.tiers[0].write == "through"


def test_a_mapping_is_read_as_a_file_is(tmp_path: Path) -> None:
    tiers = [{"name": "ram", "backend": "one", "capacity": ByteSize("1GiB")}]
    assert load_config({"tiers": tiers}).tiers[0].capacity == 1 << 30


def test_a_file_path_may_be_text(tmp_path: Path) -> None:
    assert isinstance(load_config(str(write(tmp_path, GOOD))), CacheConfig)


def test_yaml_text_in_place_of_a_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="not the YAML text"):
        load_config(GOOD)


def outcome(load: Callable[[], object]) -> str:
    """What `load` returns or the message of its ConfigError; anything else it raises fails the test."""
    try:
        return repr(load())
    except ConfigError as error:
        return str(error)


TIER = "tiers:\n  - name: a\n    backend: b\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("tierz: []\n", "cache.yaml, line 1: tierz: unknown key; did you mean 'tiers'? known here: tiers, "),
        (
            TIER + "    capasity: 1\n",
            "cache.yaml, line 4: tiers[0].capasity: unknown key; did you mean 'capacity'?",
        ),
        (TIER + "memory:\n  stagin: 1\n", "line 5: memory.stagin: unknown key; did you mean 'staging'?"),
        (
            TIER + "    breaker: {failure: 1}\n",
            "tiers[0].breaker.failure: unknown key; did you mean 'failures'?",
        ),
        (
            "chunk_tokens: 64\n",
            "tiers: required key is missing; add `tiers: ...` (The storage tiers, nearest first",
        ),
        (
            "tiers:\n  - name: a\n",
            "line 2: tiers[0].backend: required key is missing; add `backend: ...` (The plugin",
        ),
        ("tiers: []\n", "line 1: tiers: expected at least 1 entry, got 0"),
        ("tiers: cpu\n", "line 1: tiers: expected a list, got 'cpu'"),
        ("tiers: [cpu]\n", "tiers[0]: expected a mapping, got 'cpu'"),
        (
            TIER + "chunk_tokens: 100\n",
            "line 4: chunk_tokens: expected a whole number that's a multiple of 16, got 100",
        ),
        (TIER + "chunk_tokens: many\n", "chunk_tokens: expected a whole number, got 'many'"),
        (TIER + "tails: 1\n", "tails: expected true or false, got 1"),
        (
            TIER + "    write: thru\n",
            "tiers[0].write: 'thru' is not one of never, through; did you mean 'through'?",
        ),
        (TIER + "    write: on\n", "tiers[0].write: expected one of never, through, got true (a boolean)"),
        (
            TIER + "    promote: no\n",
            "promote: expected one of always, never, on_second_hit, got false (a bool",
        ),
        (
            TIER + "    options:\n",
            "tiers[0].options: expected a mapping, got nothing (null); give it a value",
        ),
        (
            TIER + "    capacity: 4 parsecs\n",
            "tiers[0].capacity: '4 parsecs' is not a size; write a number with B",
        ),
        (TIER + "    capacity: [1]\n", "tiers[0].capacity: expected a size such as 4GiB, got a list"),
        (
            TIER + "    deadline: soon\n",
            "tiers[0].deadline: 'soon' is not a duration; write a number with us",
        ),
        (TIER + "    deadline: 0\n", "line 4: tiers[0].deadline: 0s can't work; set at least 1ms"),
        (TIER + "    deadline: 10us\n", "line 4: tiers[0].deadline: 10us can't work; set at least 1ms"),
        (TIER + "    capacity: 1\n", "line 4: tiers[0].capacity: 1 can't work; set at least 8KiB"),
        (
            TIER + "    in_flight_bytes: 0\n",
            "line 4: tiers[0].in_flight_bytes: 0 can't work; set at least 8KiB",
        ),
        (TIER + "memory: {staging: 0}\n", "line 4: memory.staging: 0 can't work; set at least 16KiB"),
        (TIER + "    max_in_flight: 0\n", "tiers[0].max_in_flight: expected a whole number >= 1, got 0"),
        ("tiers:\n  - name: 7\n    backend: b\n", "tiers[0].name: expected text, got 7; put it in quotes"),
        (
            "tiers:\n  - name: A b\n    backend: b\n",
            "line 2: tiers[0].name: 'A b' is not a tier name; use up to 32 of a-z",
        ),
        (
            TIER + "  - name: a\n    backend: c\n",
            "line 4: tiers[1].name: tiers[0] is named 'a' too; give each its",
        ),
    ],
)
def test_one_error_names_the_place_the_fault_and_the_remedy(
    tmp_path: Path, content: str, expected: str
) -> None:
    assert expected in fault(tmp_path, content)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "cache.yaml: the file is empty; it must hold a mapping (`tiers: ...`)"),
        ("# nothing\n", "the file is empty"),
        ("- a\n- b\n", "must hold a mapping (`tiers: ...`), not a list"),
        ("hello\n", "must hold a mapping (`tiers: ...`), not a single value"),
        ("tiers:\n\t- name: a\n", "line 2: not valid YAML"),
        ("tiers: [\n", "not valid YAML"),
        (b"\xff\xfe\x00\x01", "not UTF-8 text (byte 0)"),
        (b"\x00\x01\x02", "not readable as YAML"),
        ("a: &x [1]\nb: *x\n", "line 1: anchors and aliases (& and *) are not allowed"),
        (
            "tiers: !!python/object/apply:os.system ['true']\n",
            "tags (tag:yaml.org,2002:python/object/apply:os.system)",
        ),
        ("a: 1\n---\nb: 2\n", "line 2: a second document begins"),
        (
            f"{TIER}    write: never\n    write: through\n",
            "line 5: tiers[0]: the key 'write' is here twice, first on line 4",
        ),
        (f"{TIER}1: 2\n", "line 4: '1' is not a text key"),
        (f"{TIER}? [a]\n: 2\n", "line 4: a list or mapping is not a text key"),
        ("tiers: " + "[" * 40 + "]" * 40, "nested more than 32 levels deep"),
        ("tiers: " + "[" * 20_000, "nested more than 32 levels deep"),
        ("when: 2026-99-99\n", "line 1: when: YAML takes this for a date; write a plain number, or put"),
        ("many: " + "9" * 5000, "not readable as YAML"),
        ("base: {<<: {a: 1}}\n", "is not a text key"),
        ("x" * (MAX_FILE_BYTES + 1), "larger than 256 KiB"),
    ],
)
def test_hostile_or_broken_files_end_in_one_config_error(
    tmp_path: Path, content: str | bytes, expected: str
) -> None:
    assert expected in fault(tmp_path, content)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        *((value, "a number of base 60") for value in ("1:30", "-1:30", "1:30.5", "190:20:30")),
        *((value, "an octal number") for value in ("017", "-010", "00", "0_7")),
        *((value, "infinity, or no number") for value in (".inf", "-.INF", ".NaN")),
        *((value, "a date") for value in ("2026-11-30", "2026-11-30 16:00:00", "2026-1-1T1:00:00Z")),
        *((value, "a word of its own") for value in ("=", "<<")),
    ],
)
def test_a_value_that_yaml_reads_as_another_one_is_refused_and_is_text_in_quotes(
    value: str, what: str
) -> None:
    with pytest.raises(ConfigError, match=r"^f, line 2: a\[0\]: YAML takes this for") as caught:
        parse_document(f"a:\n  - {value}\n", "f")
    assert f"takes this for {what}" in str(caught.value)
    assert f" {value}" not in str(caught.value)  # it may be a password
    assert parse_document(f"a: '{value}'\n", "f").value == {"a": value}


@pytest.mark.parametrize(
    ("written", "read"), [("0", 0), ("-5", -5), ("0.5", 0.5), (".5", 0.5), ("1_000", 1000), ("0x10", 16)]
)
def test_a_plain_number_is_read_as_it_is_meant(written: str, read: float) -> None:
    assert parse_document(f"a: {written}\n", "f").value == {"a": read}


def test_an_alias_bomb_is_refused_before_it_is_expanded(tmp_path: Path) -> None:
    rows = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    assert "anchors and aliases" in fault(tmp_path, "\n".join(rows))


def test_a_missing_file_a_directory_and_a_device_are_told_apart(tmp_path: Path) -> None:
    for path, expected in [
        (tmp_path / "no.yaml", "no such file"),
        (tmp_path, "not a file"),
        (Path("/dev/zero"), "not a file"),
        (Path("a\0b"), "can't be read"),
    ]:
        with pytest.raises(ConfigError, match=expected):
            load_config(path)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.text(max_size=200), st.text(alphabet="a:-[]{}&*!|>'\"#%@,?\n \t0<=.~", max_size=60)))
def test_any_text_is_either_a_mapping_or_one_config_error(text: str) -> None:
    assert outcome(lambda: parse_document(text, "x.yaml").value).startswith(("{", "x.yaml"))


JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200)
@given(st.dictionaries(st.sampled_from(["tiers", "memory", "chunk_tokens", "pin_ttl", "x"]), JSONISH))
def test_any_mapping_is_either_a_config_or_one_config_error(document: dict[str, object]) -> None:
    assert outcome(lambda: load_config(document))


def test_options_become_the_plugins_config_class() -> None:
    options = parse_options(
        Options, {"path": "~/kv", "piece": "1MiB", "wait": 2, "password": "s"}, "tiers[1].options"
    )
    assert options.path == Path("~/kv").expanduser()
    assert options.piece == 1 << 20
    assert options.wait == 2.0
    assert options.password is not None
    assert options.password.text == "s"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"pathh": "/x"},
            "tiers[1].options.pathh: unknown key; did you mean 'path'? known here: path, piece, wait",
        ),
        ({}, "tiers[1].options.path: required key is missing; add `path: ...` (Where the files lie)"),
        ({"path": 3}, "tiers[1].options.path: expected a path, got 3"),
        ({"path": "a\0b"}, "tiers[1].options.path: expected a path"),
        (
            {"path": "$HOME/kv"},
            "tiers[1].options.path: '$HOME/kv': environment variables aren't expanded; write the whole path",
        ),
        ({"path": "/x", "piece": "3MiB"}, "tiers[1].options.piece: 3MiB is not a power of two"),
        ({"path": "/x", "piece": "big"}, "tiers[1].options.piece: 'big' is not a size"),
        ({"path": "/x", 4: 5}, "tiers[1].options: the key 4 is not text"),
    ],
)
def test_option_errors_name_the_tier_and_the_option(options: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options(Options, options, "tiers[1].options")
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    "options", [{"password": 12345678}, {"passwords": "12345678"}, {"passwords": [12345678]}]
)
def test_no_error_shows_what_may_be_a_secret(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options(Options, {"path": "/x", **options}, "tiers[0].options")
    shown: BaseException | None = caught.value
    while shown is not None:
        assert "12345678" not in str(shown)
        shown = shown.__cause__


class Account(msgspec.Struct, frozen=True, kw_only=True):
    pin: int = 0
    auth_token: str = ""
    access_key_age: Duration = Duration("1d")
    servers: list[str] = []
    credentials: dict[str, int] = {}
    port: int = 0

    def __post_init__(self) -> None:
        if self.port < 0:
            raise ValueError(f"port: {self.port} with {self.auth_token!r} can't be")


@pytest.mark.parametrize(
    ("options", "secret", "said"),
    [
        ({"pin": "hunter2"}, "hunter2", "pin: expected a whole number, got something else"),
        ({"auth_token": 12345678}, "12345678", "got something else; put it in quotes to keep it text"),
        ({"access_key_age": "hunter2"}, "hunter2", "access_key_age: '***' is not a duration"),
        ({"access_key_age": "hunter2" * 12}, "hunter2", "access_key_age: '***... is not a duration"),
        ({"credentials": {"first": "hunter2"}}, "hunter2", "expected a whole number, got something else"),
        ({"port": "redis://me:hunter2@host"}, "hunter2", "got text with credentials (not shown)"),
        ({"servers": "host=db password=hunter2"}, "hunter2", "got text with credentials (not shown)"),
        ({"port": "https://host/?X-Amz-Signature=hunter2"}, "hunter2", "with credentials (not shown)"),
        ({"port": -1, "auth_token": "hun'ter2"}, "ter2", 'port: -1 with "***" can\'t be'),
    ],
)
def test_a_value_of_the_wrong_type_is_not_shown_where_it_may_be_a_secret(
    options: dict[str, object], secret: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options(Account, options, "options")
    assert said in str(caught.value)
    assert secret not in str(caught.value)


def test_a_password_that_yaml_takes_for_a_tag_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 1: tags are not allowed; .* quotes") as caught:
        read_document(write(tmp_path, "password: !hunter2\n"))
    assert "hunter2" not in str(caught.value)


def test_what_reads_another_kind_of_file_gives_its_own_example(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the file is empty; it must hold a mapping \(`options: {}`\)"):
        read_document(write(tmp_path, ""), example="options: {}")


def test_a_config_remembers_the_line_of_each_key_and_is_equal_to_one_that_does_not(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD))
    assert config.located(("tiers", 1, "options", "path")).endswith(
        "cache.yaml, line 11: tiers[1].options.path"
    )
    assert config.located(("tiers", 1, "capacity"), "none").endswith("line 8: tiers[1].capacity: none")
    again = load_config(msgspec.to_builtins(config, builtin_types=(ByteSize, Duration)))
    assert again.located(("tiers", 1), "none") == "tiers[1]: none"
    assert again == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_config_class_that_is_no_struct_is_named() -> None:
    with pytest.raises(ConfigError, match=r"int is not a msgspec\.Struct class"):
        parse_options(int, {}, "tiers[0].options")
