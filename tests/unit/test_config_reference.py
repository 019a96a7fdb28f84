from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import cast

import pytest

import lmcache_core
from lmcache_core.config import (
    BreakerConfig,
    CacheConfig,
    TierConfig,
    json_schema,
    load_config,
    option_table,
)
from lmcache_core.errors import ConfigError


def test_the_schema_is_json_and_closes_every_object() -> None:
    schema = json.loads(json.dumps(json_schema()))
    tier = schema["properties"]["tiers"]["items"]
    assert schema["required"] == ["tiers"]
    assert schema["additionalProperties"] is False
    assert tier["additionalProperties"] is False
    assert tier["properties"]["breaker"]["properties"]["cool_down"]["default"] == "5s"
    assert tier["properties"]["write"]["enum"] == ["never", "through"]


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        (
            "in_flight_bytes",
            ["4GiB", "512 MB", "1.5 KiB", "1024", " 7b ", "8tib"],
            ["4G", "-3GiB", "4 PiB", "1e9", "", "GiB", "4,5GiB", "4iB"],
        ),
        (
            "deadline",
            ["100ms", "5s", "2M", "1.5 h", "3", "7us", "1d"],
            ["5 min", "-1s", "1e3", "", "s", "1:30", "2u"],
        ),
    ],
)
def test_the_schema_takes_the_text_that_the_loader_takes(key: str, good: list[str], bad: list[str]) -> None:
    schema = json.loads(json.dumps(json_schema()))["properties"]["tiers"]["items"]["properties"][key]
    for text in [*good, *bad]:
        config = {"tiers": [{"name": "a", "backend": "b", key: text}]}
        try:
            load_config(config)
            taken = True
        except ConfigError as error:
            taken = "can't work" in str(error)  # too little is no matter of spelling
        assert (taken, bool(re.search(schema["pattern"], text))) == (text in good, text in good), text
    assert schema["minimum"] == 0


def test_every_key_has_a_description_and_its_default() -> None:
    rows = {row.name: row for row in [*option_table(CacheConfig), *option_table(TierConfig)]}
    assert [name for name, row in rows.items() if not row.description] == []
    assert rows["name"].default is None
    assert rows["in_flight_bytes"].default == "512MiB"
    assert rows["breaker.failures"].default == str(BreakerConfig().failures)
    assert rows["memory.huge_pages"].default == "true"


def test_the_schema_and_the_tables_list_the_same_keys() -> None:
    properties = cast(dict[str, object], json_schema()["properties"])
    assert {row.name.partition(".")[0] for row in option_table(CacheConfig)} <= set(properties)


def test_every_key_is_read_by_something_outside_the_config_layer() -> None:
    package = Path(lmcache_core.__file__).parent
    read = {
        node.attr
        for file in package.glob("**/*.py")
        if "config" not in file.parent.name
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    rows = [*option_table(CacheConfig), *option_table(TierConfig)]
    assert [row.name for row in rows if row.name.rpartition(".")[2] not in read] == []
