"""`PagedKV` on a GPU, whose stream is busy: frames and layers against torch indexing. Prints rates.

Needs torch with CUDA, and lmcache_core and lmcache_core_kernels on the path; gpu_check.sh sees to it.
"""

from __future__ import annotations

import sys
import time

import torch

from lmcache_core.kernels import PagedKV
from lmcache_core.memory import MemoryPool

LAYERS, HEADS, DIM, PAGE, BLOCKS = 8, 8, 128, 16, 512
CONTENT = 4 * DIM


def rows(layer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """`[heads, tokens, 2 dim]`, by torch alone."""
    return layer[slots // PAGE, :, slots % PAGE].transpose(0, 1)


def main(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    torch.cuda.init()
    device = torch.device("cuda", torch.cuda.current_device())
    shape = (BLOCKS, HEADS, PAGE, 2 * DIM)
    source = [
        torch.randint(-999, 999, shape, generator=generator).to(device, torch.bfloat16) for _ in range(LAYERS)
    ]
    target = [torch.full_like(layer, -7) for layer in source]
    cached = [torch.zeros_like(layer) for layer in source]
    busy = torch.randn(4096, 4096, device=device)
    pool = MemoryPool(512 << 20)
    kv, into = PagedKV.from_blocks(cached, axes="nhse"), PagedKV.from_blocks(target, axes="nhse")
    for num_tokens in (1, 256, 1000, 4096):
        slots = torch.randperm(BLOCKS * PAGE, generator=generator)[:num_tokens]
        where = slots.to(device)
        nbytes = HEADS * num_tokens * CONTENT
        lease = pool.try_allocate(LAYERS * nbytes, owner="check")
        assert lease is not None
        payload = [lease.memory[i * nbytes : (i + 1) * nbytes] for i in range(LAYERS)]
        for by_layer in (False, True):
            for layer in cached:
                layer.zero_()
            for layer in target:
                layer.fill_(-7)
            lease.memory[:] = b"\xa5" * len(lease.memory)
            for _ in range(20):  # the engine is behind with its work when KV is asked for
                busy = busy @ busy * 1e-4
            for to, of in zip(cached, source, strict=True):
                to.copy_(of)
            if by_layer:
                layers, loads = kv.by_layer(slots), into.by_layer(slots)
                for i, segment in enumerate(payload):
                    layers.gather_layer(i, 0, num_tokens, segment)
            else:
                kv.gather(slots, payload)
            for layer in cached:
                layer.zero_()  # after the gather in the engine's stream: not to be seen
            for i, segment in enumerate(payload):
                got = torch.frombuffer(segment, dtype=torch.bfloat16).view(HEADS, num_tokens, 2 * DIM)
                assert torch.equal(got, rows(source[i], where).cpu()), (
                    f"gather of {num_tokens} tokens, layer {i}"
                )
            if by_layer:
                for i, segment in enumerate(payload):
                    loads.scatter_layer(i, 0, num_tokens, segment)
            else:
                into.scatter(slots, payload)
                lease.memory[:] = bytes(len(lease.memory))  # the payload is free
            for i, layer in enumerate(target):
                want = torch.full_like(layer, -7)
                want[where // PAGE, :, where % PAGE] = source[i][where // PAGE, :, where % PAGE]
                assert torch.equal(layer, want), f"scatter of {num_tokens} tokens, layer {i}"
        rates = []
        for move in (kv.gather, into.scatter):
            seconds = []
            for _ in range(7):
                started = time.perf_counter()
                move(slots, payload)
                torch.cuda.current_stream().synchronize()
                seconds.append(time.perf_counter() - started)
            rates.append(LAYERS * nbytes / sorted(seconds)[3] / 1e9)
        speed = f"gather {rates[0]:.1f}, scatter {rates[1]:.1f} GB/s"
        print(f"PagedKV, {num_tokens} tokens, {LAYERS} layers: {speed}")
        del payload
        lease.release()
    print("PagedKV on the GPU: frames and layers as torch says")
    pool.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
