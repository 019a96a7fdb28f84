"""A process killed with SIGKILL in the middle of storing: what is found afterwards is whole and its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cache_scenario import CHUNK, config_of, cpu, disk, engine_of, prompt, retrieve, settle, store

PROMPTS = 100
CHUNKS = 2  # so 200 puts
CHILD = """
import sys
from pathlib import Path
from cache_scenario import *
engine = engine_of(config_of(cpu(), disk(Path(sys.argv[1]), capacity="4MiB")))
for i in range(int(sys.argv[2])):
    store(engine, prompt(i, int(sys.argv[3]) * CHUNK))
    if i % 10 == 9:
        engine.flush(20.0)
        print(i, flush=True)
    else:
        print("-", flush=True)
"""


@pytest.mark.parametrize("lines", [1, 7, 33, 64, 99])
def test_a_process_killed_between_puts_loses_nothing_it_had_flushed(tmp_path: Path, lines: int) -> None:
    support = Path(__file__).parent.parent / "support"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path), str(PROMPTS), str(CHUNKS)],
        env=os.environ | {"PYTHONPATH": str(support)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    flushed = -1
    for _ in range(lines):
        line = child.stdout.readline().strip()
        flushed = int(line) if line.isdigit() else flushed
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    with engine_of(config_of(cpu(), disk(tmp_path, capacity="4MiB"))) as engine:
        found = [retrieve(engine, prompt(i, CHUNKS * CHUNK)) for i in range(PROMPTS)]
        assert found[: flushed + 1] == [CHUNKS * CHUNK] * (flushed + 1)
        settle(engine)
        for i in range(PROMPTS):
            store(engine, prompt(i, CHUNKS * CHUNK))
        settle(engine)
        assert [retrieve(engine, prompt(i, CHUNKS * CHUNK)) for i in range(PROMPTS)] == [
            CHUNKS * CHUNK
        ] * PROMPTS
        settle(engine)
    used = sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("*") if file.is_file())
    assert used <= 4 << 20
