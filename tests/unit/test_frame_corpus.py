"""A corpus of header files, valid and hostile, each named for what it shows.

The files in tests/fuzz_corpus are what `build_corpus` returns; after changing it, or the format:
`PYTHONPATH=.:tests/unit python -c "import test_frame_corpus as t; t.write_corpus()"`
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from lmcache_core.errors import Corrupt
from lmcache_core.frame import FrameHeader, FrameKind, Segment, encode_header, parse_header
from lmcache_core.identity.keys import StorageKey

CORPUS = Path(__file__).parent.parent / "fuzz_corpus"

KEY = StorageKey("c-0123456789abcdef-" + "5a" * 32)
PARENT = StorageKey("c-0123456789abcdef-" + "a5" * 32)

# Offsets of the fixed fields, written out once more so that the parser is not checked against itself.
VERSION, KIND, PAGES, FIRST_TOKEN, NUM_TOKENS, NUM_SEGMENTS, NUM_CODECS, TEXTS = 8, 10, 12, 16, 24, 28, 30, 32
PARENT_AT = TEXTS + 2 + len(KEY)
PART_AT = PARENT_AT + 2 + len(PARENT)
FORMAT_AT = PART_AT + 2 + 16
SEGMENTS_AT = FORMAT_AT + 2 + len("kv float32 64") + 2

RECORD_KEY_ID_AT = TEXTS + 2 + len("n-" + "0" * 64) + 2 + 2 + 2 + len("model-record json")


def chunk_header() -> FrameHeader:
    return FrameHeader(
        kind=FrameKind.CHUNK,
        key=KEY,
        parent=PARENT,
        part="0123456789abcdef",
        content_format="kv float32 64",
        first_token=256,
        num_tokens=256,
        segments=(Segment(4096, 4096, 1), Segment(5000, 5000, 2**64 - 1)),
    )


def resealed(encoded: bytes, *patches: tuple[int, str, int]) -> bytes:
    """The header with fields overwritten and its checksum made right again: only the rules can refuse it."""
    data = bytearray(encoded)
    for offset, code, value in patches:
        struct.pack_into(f"<{code}", data, offset, value)
    struct.pack_into("<Q", data, len(data) - 8, xxhash.xxh3_64_intdigest(data[:-8]))
    return bytes(data)


def build_corpus() -> dict[str, bytes]:
    chunk = encode_header(chunk_header())
    first = FrameHeader(
        kind=FrameKind.CHUNK,
        key=KEY,
        parent=None,
        part="f" * 16,
        content_format="",
        first_token=0,
        num_tokens=16,
        segments=(Segment(100, 200, 3),),
        codecs=("zstd-3", "aes-256-gcm"),
        key_id="key 7",
    )
    record = FrameHeader(
        kind=FrameKind.RECORD,
        key=StorageKey("n-" + "0" * 64),
        parent=None,
        part="",
        content_format="model-record json",
        first_token=0,
        num_tokens=0,
        segments=(Segment(1, 1, 0),),
    )
    many = FrameHeader(
        kind=FrameKind.CHUNK,
        key=KEY,
        parent=PARENT,
        part="0" * 16,
        content_format="kv bfloat16 128",
        first_token=2**48,
        num_tokens=2**31 - 1,
        segments=tuple(Segment(i + 1, i + 1, i) for i in range(200)),
    )
    corpus = {
        "valid-chunk": chunk,
        "valid-first-chunk-with-codecs": encode_header(first),
        "valid-record": encode_header(record),
        "valid-two-pages": encode_header(many),
        "valid-with-bytes-after": chunk + b"\xff" * 100,
        "hostile-empty": b"",
        "hostile-one-byte-short": chunk[:-1],
        "hostile-second-page-missing": encode_header(many)[:4096],
        "hostile-zeros": bytes(4096),
        "hostile-ones": b"\xff" * 4096,
        "hostile-checksum": chunk[:-1] + bytes([chunk[-1] ^ 1]),
        "hostile-nonzero-padding": resealed(chunk, (4000, "B", 1)),
        "hostile-needless-page": resealed(chunk[:-8] + bytes(8 + 4096), (PAGES, "I", 2)),
        "hostile-text-not-ascii": resealed(chunk, (FORMAT_AT + 2, "B", 0xC3)),
        "hostile-text-control-character": resealed(chunk, (FORMAT_AT + 2, "B", 10)),
        "hostile-key-upper-case": resealed(chunk, (TEXTS + 2, "B", ord("C"))),
        "hostile-parent-with-slash": resealed(chunk, (PARENT_AT + 3, "B", ord("/"))),
        "hostile-part-not-hex": resealed(chunk, (PART_AT + 2, "B", ord("g"))),
        "hostile-segment-empty": resealed(chunk, (SEGMENTS_AT, "Q", 0)),
        "hostile-segment-huge": resealed(chunk, (SEGMENTS_AT, "Q", 2**63), (SEGMENTS_AT + 8, "Q", 2**63)),
        "hostile-raw-differs-without-codec": resealed(chunk, (SEGMENTS_AT + 8, "Q", 4097)),
        "hostile-record-with-tokens": resealed(encode_header(record), (NUM_TOKENS, "I", 1)),
        "hostile-record-as-chunk": resealed(encode_header(record), (KIND, "H", 1)),
        "hostile-texts-past-the-header": resealed(
            encode_header(record), (NUM_CODECS, "H", 1), (RECORD_KEY_ID_AT, "H", 0xFFFF)
        ),
        "hostile-codecs-past-the-header": resealed(
            encode_header(record),
            (NUM_CODECS, "H", 0xFFFF),
            (RECORD_KEY_ID_AT + 2, "Q", 0),
            (RECORD_KEY_ID_AT + 10, "Q", 0),
        ),
    }
    for name, offset, code, values in (
        ("version", VERSION, "H", (0, 2, 0xFFFF)),
        ("kind", KIND, "H", (0, 2, 3)),
        ("pages", PAGES, "I", (0, 2, 26, 2**32 - 1)),
        ("first-token", FIRST_TOKEN, "Q", (2**48 + 1, 2**64 - 1)),
        ("num-tokens", NUM_TOKENS, "I", (0, 2**31)),
        ("num-segments", NUM_SEGMENTS, "H", (0, 1, 3, 200, 4096, 0xFFFF)),
        ("num-codecs", NUM_CODECS, "H", (1, 8, 9, 0xFFFF)),
        ("key-length", TEXTS, "H", (0, 1, 121, 129, 0xFFFF)),
    ):
        corpus |= {f"hostile-{name}-{value}": resealed(chunk, (offset, code, value)) for value in values}
    return corpus


def write_corpus(directory: Path = CORPUS) -> None:
    for name, content in build_corpus().items():
        (directory / f"{name}.bin").write_bytes(content)


def test_the_corpus_files_are_the_ones_that_the_builder_writes() -> None:
    assert {path.stem: path.read_bytes() for path in CORPUS.glob("*.bin")} == build_corpus()


@pytest.mark.parametrize("path", sorted(CORPUS.glob("valid-*.bin")), ids=lambda path: path.stem)
def test_a_valid_header_encodes_to_the_bytes_it_was_parsed_from(path: Path) -> None:
    content = path.read_bytes()
    header = parse_header(memoryview(content))
    assert encode_header(header) == content[: header.header_nbytes]


@pytest.mark.parametrize("path", sorted(CORPUS.glob("hostile-*.bin")), ids=lambda path: path.stem)
def test_a_hostile_header_is_corrupt(path: Path) -> None:
    with pytest.raises(Corrupt):
        parse_header(memoryview(path.read_bytes()))


@pytest.mark.parametrize("kind", ["bytes", "bytearray", "memoryview"])
def test_any_flat_buffer_can_be_parsed(kind: str) -> None:
    wrap: dict[str, Callable[[bytes], object]] = {
        "bytes": bytes,
        "bytearray": bytearray,
        "memoryview": memoryview,
    }
    encoded = encode_header(chunk_header())
    assert parse_header(wrap[kind](encoded)) == chunk_header()  # type: ignore[arg-type]
