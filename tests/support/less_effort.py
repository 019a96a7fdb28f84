"""Has the conformance suite of a documented package try less hard than a published report needs.

Its backend was certified with full effort when its page was written; what a test of the page proves is that
the page still holds. `make test` has no time for both.
"""

from __future__ import annotations

from pathlib import Path

EFFORT = {
    "rounds": 40,
    "interruptions": 30,
    "examples": 8,
    "crash_points": 8,
    "measurements": 3,
    "slack_s": 10.0,  # of a busy machine
}


def try_less_hard(module: Path, harness: str) -> None:
    """Adds these numbers to the harness in a test module, and nothing else."""
    lines = [f"{harness}.{name} = {value}\n" for name, value in EFFORT.items()]
    with module.open("a", encoding="utf-8") as file:
        file.write("".join(["\n\n", *lines]))
