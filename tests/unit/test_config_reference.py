from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import cast

import lmcache_core
from lmcache_core.config import BreakerConfig, CacheConfig, TierConfig, json_schema, option_table


def test_the_schema_is_json_and_closes_every_object() -> None:
    schema = json.loads(json.dumps(json_schema()))
    tier = schema["properties"]["tiers"]["items"]
    assert schema["required"] == ["tiers"]
    assert schema["additionalProperties"] is False
    assert tier["additionalProperties"] is False
    assert tier["properties"]["breaker"]["properties"]["cool_down"]["default"] == "5s"
    assert tier["properties"]["write"]["enum"] == ["never", "through"]


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
