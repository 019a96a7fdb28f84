"""Narrowing to float8 with scales and back, against an oracle that knows the format's 127 magnitudes."""

from __future__ import annotations

import bisect
import math
import struct

import numpy as np
import pytest
import torch

from lmcache_core.errors import UnsupportedModel
from lmcache_core.kernels import PagedKV, paged
from lmcache_core.kernels.compiled import native_library

HEADS, BLOCKS, BLOCK_SLOTS = 2, 3, 2
SENTINEL = 0xA5
MOVERS = ["reference"] if native_library() is None else ["reference", "compiled"]

# float8_e4m3fn: 4 bits of exponent with bias 7, 3 of mantissa, subnormals; 0x7f is NaN, there is no infinity.
MAGNITUDES = [
    (code & 7) * 2.0**-9 if code < 8 else (8 + (code & 7)) * 2.0 ** ((code >> 3) - 10) for code in range(127)
]


@pytest.fixture(params=MOVERS, autouse=True)
def mover(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "reference":
        monkeypatch.setattr(paged, "native_library", lambda: None)
    return request.param


def nearest(value: float) -> int:
    """The code of the closest magnitude, the even code of two that are as close."""
    above = bisect.bisect_left(MAGNITUDES, abs(value))
    candidates = [code for code in (above - 1, above) if 0 <= code < 127]
    code = min(candidates, key=lambda code: (abs(MAGNITUDES[code] - abs(value)), code & 1))
    return code | (0x80 if math.copysign(1, value) < 0 else 0)


def expected(row: np.ndarray) -> tuple[bytes, float]:
    """One row of float32 values that bfloat16 can say, as bytes of float8 and their scale."""
    if not np.isfinite(row).all():
        return b"\x7f" * len(row), 1.0
    scale = max(np.abs(row).max() / np.float32(448), np.float32(2.0**-126))
    return bytes(nearest(float(value / scale)) for value in row), float(scale)


def rounded(value: np.float32) -> int:
    """The bits of the nearest bfloat16, ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    upper, rest = bits >> 16, bits & 0xFFFF
    return int(upper + (rest > 0x8000 or (rest == 0x8000 and upper & 1)))


def engine(axes: str, dim: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's tensor in these axes, and its K and V as `[2, heads, slots, dim]` float32."""
    generator = torch.Generator().manual_seed(seed)
    shape = {"c": 2, "h": HEADS, "n": BLOCKS, "s": BLOCK_SLOTS, "d": dim}
    kv = torch.randn([2, HEADS, BLOCKS, BLOCK_SLOTS, dim], generator=generator)
    kv *= torch.tensor([1e-30, 1e-3, 1.0, 700.0])[torch.randint(0, 4, kv.shape[:-1], generator=generator)][
        ..., None
    ]
    kv = kv.bfloat16()
    special = kv.view(2 * HEADS * BLOCKS * BLOCK_SLOTS, dim)
    special[0] = 0
    special[1, 0] = math.inf
    special[2, -1] = math.nan
    special[3] = 9.2e-41  # the smallest magnitude
    special[4] = -3.38e38  # the largest
    special[5, ::2] = -0.0
    if "e" in axes:
        order = ["chnsd".index(axis) for axis in axes.replace("e", "cd")]
        tensor = kv.permute(order).flatten(-2).contiguous()
    else:
        tensor = kv.permute(["chnsd".index(axis) for axis in axes]).contiguous()
    assert tensor.dtype == torch.bfloat16
    assert tensor.numel() == math.prod(shape.values())
    return tensor, kv.float().reshape(2, HEADS, BLOCKS * BLOCK_SLOTS, dim)


@pytest.mark.parametrize("axes", ["cnshd", "ncshd", "nhse", "nshe"])
@pytest.mark.parametrize("dim", [1, 7, 64, 128])
def test_narrowed_values_and_scales_are_the_nearest_the_format_has(axes: str, dim: int) -> None:
    tensor, values = engine(axes, dim, seed=dim)
    kv = PagedKV.from_blocks([tensor], axes=axes, narrow=True)
    assert (kv.content_format, kv.content_nbytes) == (f"kv float8_e4m3fn+scale {dim}", 2 * dim + 8)
    slots = [5, -1, 0, 1, 2, 4]
    payload = memoryview(bytearray([SENTINEL]) * (HEADS * len(slots) * kv.content_nbytes))
    kv.gather(torch.tensor(slots), [payload])
    for head in range(HEADS):
        for token, slot in enumerate(slots):
            start = (head * len(slots) + token) * kv.content_nbytes
            content = bytes(payload[start : start + kv.content_nbytes])
            if slot < 0:
                assert content == bytes([SENTINEL]) * kv.content_nbytes
                continue
            (keys, key_scale), (vals, value_scale) = (
                expected(values[kind, head, slot].numpy()) for kind in range(2)
            )
            assert content == keys + vals + struct.pack("<ff", key_scale, value_scale)


# Times a power of two, 1 + 2^-8 is as far from one bfloat16 as from the next, and the lower one is even; of
# 1 + 3 x 2^-8 the upper one is.
TIES = [np.float32(1 + 2.0**-8), np.float32(1 + 3 * 2.0**-8)]


@pytest.mark.parametrize("axes", ["cnshd", "nhse"])
@pytest.mark.parametrize("dim", [7, 128])
@pytest.mark.parametrize("scales", [[np.float32(0.0123), np.float32(2.0**-120)], TIES], ids=["small", "ties"])
def test_widened_values_are_float8_times_scale_in_bfloat16(
    axes: str, dim: int, scales: list[np.float32]
) -> None:
    blank = torch.full_like(engine(axes, dim, seed=1)[0].view(torch.int16), 0x2525).view(torch.bfloat16)
    target = PagedKV.from_blocks([blank], axes=axes, narrow=True)
    slots = [3, -1, 0]
    codes = np.random.default_rng(dim).integers(0, 256, [HEADS, len(slots), 2, dim], dtype=np.uint8)
    codes[0, 0, :, :3] = 0x38, 0xB8, 0x01  # 1, -1, a subnormal
    codes[0, 0, 0, -1] = 0x7F  # NaN
    payload = b"".join(
        codes[head, token].tobytes() + struct.pack("<ff", *scales)
        for head in range(HEADS)
        for token in range(len(slots))
    )
    target.scatter(torch.tensor(slots), [memoryview(payload)])
    if "e" in axes:
        got = blank.permute(1, 0, 2, 3).reshape(HEADS, BLOCKS * BLOCK_SLOTS, 2, dim).permute(2, 0, 1, 3)
    else:
        got = blank.permute(0, 3, 1, 2, 4).reshape(2, HEADS, BLOCKS * BLOCK_SLOTS, dim)
    for kind in range(2):
        for head in range(HEADS):
            for slot in range(BLOCKS * BLOCK_SLOTS):
                row = got[kind, head, slot]
                if slot not in slots:
                    assert torch.all(row.view(torch.int16) == 0x2525)
                    continue
                for code, value in zip(codes[head, slots.index(slot), kind], row, strict=True):
                    if code & 0x7F == 0x7F:
                        assert math.isnan(value)
                        continue
                    want = (
                        rounded(np.float32(MAGNITUDES[code & 0x7F]) * scales[kind]) | (int(code) & 0x80) << 8
                    )
                    assert value.view(torch.int16).item() & 0xFFFF == want


def test_a_round_trip_stays_within_the_formats_precision() -> None:
    keys, values = (torch.randn(1, 4, 300, 64).bfloat16() for _ in range(2))
    kv = PagedKV.from_pairs([keys], [values], narrow=True)
    payload = memoryview(bytearray(4 * 200 * kv.content_nbytes))
    kv.gather(range(50, 250), [payload])
    loaded = [torch.zeros_like(keys), torch.zeros_like(values)]
    PagedKV.from_pairs([loaded[0]], [loaded[1]], narrow=True).scatter(range(50, 250), [payload])
    for got, want in zip(loaded, (keys, values), strict=True):
        got, want = got[:, :, 50:250].float(), want[:, :, 50:250].float()
        row_max = want.abs().amax(-1, keepdim=True)
        # Half a step of 3 mantissa bits, or of a subnormal, and bfloat16's own rounding.
        bound = torch.maximum(want.abs() / 16, row_max / 448 * 2**-10) * (1 + 2**-7) + want.abs() * 2**-8
        assert torch.all((got - want).abs() <= bound)


def test_only_bfloat16_keys_and_values_are_narrowed() -> None:
    with pytest.raises(UnsupportedModel, match="float32"):
        PagedKV.from_pairs([torch.zeros(1, 2, 4, 8)], [torch.zeros(1, 2, 4, 8)], narrow=True)
    with pytest.raises(UnsupportedModel, match="only K and V in bfloat16"):
        PagedKV.from_blocks([torch.zeros(4, 2, 8).bfloat16()], axes="nsd", narrow=True)
