"""Identity in other processes: equal under any hash seed, and light to import."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NAME_EVERYTHING = """
import hashlib
from array import array
from lmcache_core.identity import *
model = ModelRecord(weights="ab" * 32, config={"b": {"y": 1, "x": [2.5, None]}, "a": True}, chunk_tokens=64)
part = Part(layers=(0, 30), heads=(0, 3), content_format="kv float32 64", content_nbytes=512, group="full")
content = Content(model, lora=b"lora", salt=b"salt")
content.extend(array("i", range(200)), [Extra(9, "image", b"1"), Extra(9, "audio", b"2")])
host = Content.from_host(model, HostScheme(algorithm="sha256", seed="0", block_tokens=16), [bytes(32)] * 8)
tensors = [("a", "float32", (2,), bytes(8)), ("b", "float32", (1,), bytes(4))]
named = [model.key, part.digest, content.salt_tag, content.root.hex(), parameters_fingerprint(tensors)]
named += content.keys(part) + [tail.key for tail in content.tails_after(part, 1)] + host.keys(part)
print(hashlib.sha256("".join(named).encode()).hexdigest())
"""

EVERYTHING = "b9045a6ace12f3abf1d32f77255dec78da9f7b18f11abd81036312ca12f472a1"


def python(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize("seed", ["0", "1", "4294967295", "random"])
def test_every_name_is_the_same_in_every_process(seed: str) -> None:
    assert python(NAME_EVERYTHING, PYTHONHASHSEED=seed) == EVERYTHING


def test_importing_identity_loads_neither_torch_nor_numpy() -> None:
    program = "import sys, lmcache_core.identity; print({'torch', 'numpy'} & {*sys.modules})"
    assert python(program) == "set()"
