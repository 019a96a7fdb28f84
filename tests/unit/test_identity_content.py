"""One request's content: frozen hashes, incremental hashing, tails, secrets, host hashes."""

from __future__ import annotations

import hashlib
import pickle
import struct
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lmcache_core.identity import Content, Extra, HostScheme, ModelRecord, Part, Tail, encode
from lmcache_core.identity import content as content_module

MODEL = ModelRecord(weights="ab" * 32, config={"dtype": "float32"}, chunk_tokens=64)
PART = Part(layers=(0, 30), heads=(0, 3), content_format="kv float32 64", content_nbytes=512)
TOKENS = array("i", range(200))
EXTRAS = (Extra(70, "image", b"\x01\x02"), Extra(3, "image", b"\x03"), Extra(70, "audio", b""))
SALT = b"a tenant's secret"


def content(tokens: Any = TOKENS, extras: Sequence[Extra] = (), **secrets: bytes) -> Content:
    made = Content(MODEL, **secrets)
    made.extend(tokens, extras)
    return made


def span_hash(
    previous: bytes, tokens: Sequence[int], extras: Sequence[tuple[int, bytes, bytes]] = ()
) -> bytes:
    """The specification, written a second time."""
    preimage = previous + struct.pack(f"<I{len(tokens)}i", len(tokens), *tokens)
    for offset, kind, value in extras:
        preimage += struct.pack("<II", offset, len(kind)) + kind + struct.pack("<I", len(value)) + value
    return hashlib.blake2b(preimage, digest_size=32).digest()


def test_roots_never_change() -> None:
    assert Content(MODEL).root.hex() == "bbf16e7bbb3d0b1d35eda71aa5121fe8c25a2e4906a664beb6bfc202cb9cda7e"
    assert (
        Content(MODEL, lora=b"adapter").root.hex()
        == "1079a5398d9b02fca2bb954326ec6549b54cb31b895a18f80dec23f7f9f321b7"
    )
    assert (
        Content(MODEL, salt=SALT).root.hex()
        == "1d761f7269b9541c365e2c22bba200f25e3a4af4ec61d0d81c22547ba694ed52"
    )


def test_the_root_is_what_the_specification_says() -> None:
    keyed = hashlib.blake2b(b"root", digest_size=32, key=hashlib.blake2b(SALT).digest()).digest()
    scheme = HostScheme(algorithm="sha256", seed=None, block_tokens=16)
    for made, fields in (
        (Content(MODEL, lora=b"adapter", salt=SALT), [MODEL.digest, b"adapter", keyed, None]),
        (Content.from_host(MODEL, scheme, []), [MODEL.digest, b"", b"", ["sha256", None, 16]]),
    ):
        expected = hashlib.blake2b(encode(fields), digest_size=32, person=b"lmcache-core c1")
        assert made.root == expected.digest()


def test_chunk_hashes_and_keys_never_change() -> None:
    made = content()
    assert [h.hex() for h in made.hashes] == [
        "6a68e0f67209f2bd574e05d48e2d32938b82ee4cd8d19c6917830ea837aa8621",
        "8247b9e10940e949f3538661cd032f0cb120e91c65b437de758a847269b433a7",
        "21daf404cb4645493f63cd14fa0963e0a64f186121b92f8b309d1d713969a8cd",
    ]
    assert made.keys(PART) == [f"c-{PART.digest}-{h.hex()}" for h in made.hashes]
    assert (
        content(extras=EXTRAS).hashes[1].hex()
        == "3f6c602007366552a7ea2fe7dd0adf4d7746a6d8337a2ad913a6ec65e7b89601"
    )


def test_hashes_are_chained_as_specified() -> None:
    made = content(extras=EXTRAS)
    first = span_hash(made.root, TOKENS[:64], [(3, b"image", b"\x03")])
    second = span_hash(first, TOKENS[64:128], [(6, b"audio", b""), (6, b"image", b"\x01\x02")])
    assert made.hashes == [first, second, span_hash(second, TOKENS[128:192])]


def test_each_chunk_is_hashed_once_however_the_request_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    made, calls = Content(MODEL), []

    def counting(*args: Any, **options: Any) -> Any:
        calls.append(len(args[0]))
        return hashlib.blake2b(*args, **options)

    monkeypatch.setattr(content_module, "blake2b", counting)
    for token in TOKENS:
        made.extend((token,))
        made.keys(PART)
    assert calls == [32 + 4 + 64 * 4] * 3
    assert made.hashes == content().hashes


def test_a_chunk_is_a_range_of_tokens() -> None:
    assert [content().chunk(i) for i in range(3)] == [(0, 64), (64, 64), (128, 64)]
    for i in (3, -1):
        with pytest.raises(IndexError):
            content().chunk(i)


def test_tails_are_named_at_multiples_of_16_longest_first() -> None:
    made = content(TOKENS[:180])
    assert [(tail.first_token, tail.num_tokens) for tail in made.tails(PART)] == [
        (128, 48),
        (128, 32),
        (128, 16),
    ]
    expected = span_hash(made.hashes[1], TOKENS[128:160])
    assert made.tails(PART)[1].key == f"c-{PART.digest}-{expected.hex()}"


@pytest.mark.parametrize(
    ("num_tokens", "lengths"), [(0, []), (15, []), (16, [16]), (63, [48, 32, 16]), (64, [])]
)
def test_a_tail_needs_16_tokens_and_is_shorter_than_a_chunk(num_tokens: int, lengths: list[int]) -> None:
    assert [tail.num_tokens for tail in content(TOKENS[:num_tokens]).tails(PART)] == lengths


def test_tails_after_an_earlier_chunk_are_those_a_shorter_request_stored() -> None:
    assert content().tails_after(PART, 1)[1:] == content(TOKENS[:100]).tails(PART)
    assert content().tails_after(PART, 0)[0] == content(TOKENS[:48]).tails(PART)[0]
    assert content().tails_after(PART, 3) == content().tails(PART) == []
    for num_chunks in (4, -1):
        with pytest.raises(IndexError):
            content().tails_after(PART, num_chunks)


def test_a_tail_holds_only_the_extras_that_lie_in_it() -> None:
    plain, marked = content(TOKENS[:60]), content(TOKENS[:60], [Extra(20, "image", b"x")])
    assert [a == b for a, b in zip(plain.tails(PART), marked.tails(PART), strict=True)] == [
        False,
        False,
        True,
    ]


def test_keys_name_the_part() -> None:
    half = Part(layers=(0, 15), heads=(0, 3), content_format="kv float32 64", content_nbytes=512)
    made = content()
    assert not {*made.keys(PART)} & {*made.keys(half)}
    assert made.keys(half) == made.keys(half)


def test_lists_that_are_handed_out_may_be_changed() -> None:
    made = content()
    made.hashes.clear()
    made.keys(PART).clear()
    assert len(made.keys(PART)) == len(made.hashes) == 3


def test_a_view_of_the_tokens_stays_valid_while_the_request_grows() -> None:
    made = content(TOKENS[:100])
    view = made.tokens
    for token in TOKENS[100:]:
        made.extend((token,))
    assert view.tolist() == TOKENS[:100].tolist()
    assert made.tokens.tolist() == TOKENS.tolist()
    assert view.readonly


@pytest.mark.parametrize(
    "same",
    [
        TOKENS.tolist(),
        tuple(TOKENS),
        range(200),
        memoryview(TOKENS),
        array("I", TOKENS),
        array("q", TOKENS),
        np.arange(200, dtype=np.int32),
        np.arange(200, dtype=np.int64),
        np.arange(200, dtype=np.uint64),
        np.arange(400, dtype=np.int64)[::2] // 2,
        (np.arange(400, dtype=np.int32) // 2)[::2],
        (np.arange(400, dtype=np.int64) // 2)[::2],
        np.arange(200, dtype=np.int32)[::-1][::-1],
        torch.arange(200),
        torch.arange(200, dtype=torch.int32),
        [np.int64(token) for token in TOKENS],
    ],
    ids=lambda same: f"{type(same).__name__} {getattr(same, 'dtype', '')}",
)
def test_the_container_of_the_tokens_does_not_matter(same: Any) -> None:
    assert content(same).hashes == content().hashes
    assert content(same).tokens.tolist() == TOKENS.tolist()


def test_int64_tokens_are_converted_across_block_borders() -> None:
    many = np.random.default_rng(0).integers(0, 2**31, 20_000, dtype=np.int64)
    assert content(many).tokens.tolist() == many.tolist()
    many[8192] = 2**31
    with pytest.raises(ValueError, match="from 0 to 2147483647"):
        content(many)


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [2**31],
        [2**80],
        array("i", [5, -1]),
        array("I", [2**31]),
        array("q", [1, -1]),
        array("q", [2**31]),
        array("q", [2**32]),
        array("Q", [2**63]),
        np.array([-(2**31)], dtype=np.int32),
    ],
)
def test_an_id_outside_int32_or_negative_is_one_clear_error(tokens: Any) -> None:
    with pytest.raises(ValueError, match="token ids must be from 0 to 2147483647"):
        content(tokens)


def test_more_than_one_dimension_is_refused_with_the_shape() -> None:
    for tokens in (np.zeros((1, 8), dtype=np.int32), torch.zeros((1, 8), dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"one dimension, not the shape \(1, 8\)"):
            content(tokens)


@pytest.mark.parametrize(
    "tokens",
    [
        [1.0],
        [1, None],
        ["1"],
        "text",
        b"bytes",
        {1, 2},
        pytest.param(iter([1]), id="iterator"),
        7,
        None,
        array("f", [1.0]),
        array("h", [1]),
        np.zeros(4, dtype=np.float64),
        np.zeros(4, dtype=">i4"),
        torch.zeros(4),
    ],
    ids=repr,
)
def test_what_is_not_a_row_of_ints_is_a_type_error(tokens: Any) -> None:
    with pytest.raises(TypeError, match="tokens must be"):
        content(tokens)


@pytest.mark.parametrize("extra", [Extra(99, "k", b""), Extra(200, "k", b""), Extra(-1, "k", b"")])
def test_an_extra_outside_the_added_tokens_is_refused(extra: Extra) -> None:
    made = content(TOKENS[:100])
    with pytest.raises(ValueError, match="these tokens are 100 to 199"):
        made.extend(TOKENS[100:], [Extra(150, "k", b""), extra])
    made.extend(TOKENS[100:])
    assert made.hashes == content().hashes


@pytest.mark.parametrize("fields", [(True, "k", b""), (0, b"k", b""), (0, "k", "v"), (0.0, "k", b"")])
def test_an_extra_of_the_wrong_types_is_refused(fields: Any) -> None:
    with pytest.raises(TypeError, match="an extra needs"):
        content(extras=[Extra(*fields)])


def test_extras_may_come_in_any_order() -> None:
    assert content(extras=EXTRAS).hashes == content(extras=EXTRAS[::-1]).hashes


def test_an_extra_changes_its_chunk_and_all_that_follow() -> None:
    marked = content(extras=[Extra(64, "image", b"x")])
    assert [a == b for a, b in zip(marked.hashes, content().hashes, strict=True)] == [True, False, False]


def test_a_salt_isolates_and_is_found_nowhere() -> None:
    made = content(salt=SALT, extras=EXTRAS)
    other = content(salt=SALT + b"!")
    assert not {*made.hashes} & {*other.hashes} | {*made.hashes} & {*content().hashes}
    shown = [repr(made), str(made), repr(MODEL), *made.keys(PART), *(tail.key for tail in made.tails(PART))]
    for text in shown:
        assert SALT.decode() not in text
        assert SALT.hex() not in text
    for stored in (pickle.dumps(made), made.root, *made.hashes, MODEL.to_json()):
        assert SALT not in stored


def test_a_repr_shows_counts_only() -> None:
    assert repr(content(salt=SALT)) == "Content(200 tokens, 3 whole chunks)"
    assert "secret" not in repr(Extra(0, "image", b"secret"))


def test_a_salts_tag_is_64_bits_and_the_same_under_every_model() -> None:
    other = ModelRecord(weights="cd" * 32, config={}, chunk_tokens=16)
    assert Content(MODEL, salt=SALT).salt_tag == "b522c3b99e5e4ad0"
    assert Content(other, salt=SALT, lora=b"x").salt_tag == Content(MODEL, salt=SALT).salt_tag
    assert Content(MODEL, salt=b"other").salt_tag != Content(MODEL, salt=SALT).salt_tag
    assert Content(MODEL).salt_tag == ""
    assert Content(MODEL, salt=SALT).salt_tag not in Content(MODEL, salt=SALT).root.hex()


def test_a_salt_of_the_wrong_type_is_refused_without_being_shown() -> None:
    with pytest.raises(TypeError) as refused:
        Content(MODEL, salt="hidden")  # type: ignore[arg-type]
    assert "hidden" not in str(refused.value)


def test_content_survives_pickling() -> None:
    made = pickle.loads(pickle.dumps(content(TOKENS[:100], salt=SALT)))
    made.extend(TOKENS[100:])
    assert made.keys(PART) == content(salt=SALT).keys(PART)


FIXED = HostScheme(algorithm="sha256", seed="0", block_tokens=32)
DIGESTS = [hashlib.sha256(bytes([i])).digest() for i in range(7)]


def test_host_hashes_name_whole_chunks_and_tails() -> None:
    made = Content.from_host(MODEL, FIXED, DIGESTS)
    assert (made.num_tokens, made.num_chunks) == (224, 3)
    assert made.hashes[0].hex() == "8f8b5f88d3a5029ebc161c2779696dfe7f52434ba6986b4981cce87d85c0c332"
    assert [(tail.first_token, tail.num_tokens) for tail in made.tails(PART)] == [(192, 32)]
    assert made.persistent
    assert made.not_persistent_reason == ""


def test_host_hashes_may_arrive_block_by_block() -> None:
    grown = Content.from_host(MODEL, FIXED, [])
    for digest in DIGESTS:
        grown.extend_digests([digest])
    whole = Content.from_host(MODEL, FIXED, DIGESTS)
    assert grown.keys(PART) == whole.keys(PART)
    assert grown.tails(PART) == whole.tails(PART)


@pytest.mark.parametrize(
    "scheme",
    [
        HostScheme(algorithm="sha512", seed="0", block_tokens=32),
        HostScheme(algorithm="sha256", seed="1", block_tokens=32),
        HostScheme(algorithm="sha256", seed=None, block_tokens=32),
        HostScheme(algorithm="sha2560", seed="", block_tokens=32),
        HostScheme(algorithm="sha256", seed="0", block_tokens=64),
    ],
)
def test_every_field_of_the_hosts_scheme_is_in_the_root(scheme: HostScheme) -> None:
    other = Content.from_host(MODEL, scheme, DIGESTS)
    assert other.root not in {Content.from_host(MODEL, FIXED, DIGESTS).root, Content(MODEL).root}


def test_host_content_is_isolated_by_salt_and_lora() -> None:
    roots = {
        Content.from_host(MODEL, FIXED, [], **secrets).root
        for secrets in ({}, {"salt": SALT}, {"lora": SALT}, {"salt": SALT, "lora": SALT})
    }
    assert len(roots) == 4


def test_a_random_seed_refuses_persistence_with_the_reason() -> None:
    made = Content.from_host(MODEL, HostScheme(algorithm="sha256", seed=None, block_tokens=16), DIGESTS)
    assert not made.persistent
    assert "random seed in every process" in made.not_persistent_reason
    assert content().persistent


def test_a_host_hash_that_two_prefixes_may_share_is_refused() -> None:
    made = Content.from_host(MODEL, FIXED, DIGESTS[:1])
    with pytest.raises(ValueError, match="8 bytes can belong to two prefixes"):
        made.extend_digests([DIGESTS[1], b"12345678"])
    assert made.num_tokens == 32
    with pytest.raises(TypeError, match="must be bytes"):
        made.extend_digests([123])  # type: ignore[list-item]


@pytest.mark.parametrize("block_tokens", [0, -1, 48, 128])
def test_a_chunk_must_be_whole_blocks_of_the_host(block_tokens: int) -> None:
    with pytest.raises(ValueError, match="is no multiple of the host's block"):
        Content.from_host(MODEL, HostScheme(algorithm="sha256", seed="0", block_tokens=block_tokens), DIGESTS)


def test_host_content_has_no_tokens() -> None:
    made = Content.from_host(MODEL, FIXED, DIGESTS)
    with pytest.raises(TypeError):
        made.extend(TOKENS)
    with pytest.raises(TypeError):
        _ = made.tokens


def test_a_tail_is_a_value() -> None:
    assert content(TOKENS[:16]).tails(PART) == [Tail(content(TOKENS[:16]).tails(PART)[0].key, 0, 16)]
