"""What the killed processes do, operation by operation."""

from __future__ import annotations

CAPACITY = 5 << 18  # so small that room for the large values must be made
LONG = "c-" + "0" * 100 + "-"

Operation = tuple[str, str, int, int]  # put or delete, key, seed, pages

VALUES: list[Operation] = [
    ("put", "a", 1, 4),
    ("put", "b", 2, 4),
    ("put", "a", 3, 4),
    ("delete", "b", 0, 0),
    ("put", "c", 4, 4),
    ("put", "large", 5, 120),
    ("put", "d", 6, 2),
    ("delete", "large", 0, 0),
    ("put", "larger", 7, 150),
    ("put", "a", 8, 2),
    ("delete", "nothing", 0, 0),
    ("put", "e", 9, 2),
]
COMPACTION: list[Operation] = [("put", f"{LONG}{number % 3}", number, 1) for number in range(66)]
SCENARIOS = {"values": VALUES, "compaction": COMPACTION}
UNHARMED = {"values": 0, "compaction": 56}  # operations before killing begins: the journal fills up
