"""Compiled gather and scatter between paged KV and frames, for lmcache-core. Importing this loads nothing."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BuildInfo", "build_info"]


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """What was built, and what this machine makes of it."""

    version: str
    instructions: str
    """What the host's copies use here: `avx512`, `avx2` or `baseline`."""
    cuda: str
    """Toolkit and architectures of the device library; empty where there is none that can be loaded."""
    no_cuda: str = "nvcc was not there at build time"
    """Why `cuda` is empty, if it is."""

    def __str__(self) -> str:
        device = f"CUDA {self.cuda}" if self.cuda else f"no CUDA ({self.no_cuda})"
        return f"lmcache-core-kernels {self.version}: host ({self.instructions}), {device}"


def build_info() -> BuildInfo:
    """Loads the libraries and asks them. Needs neither a GPU nor a driver.

    Raises:
        OSError: the host's library is missing, doesn't load, or belongs to another version of this package.
    """
    from importlib.metadata import version

    from lmcache_core_kernels.abi import device_library, host_library

    instructions = host_library().lmck_instructions().decode()
    here = version("lmcache-core-kernels")
    try:
        device = device_library()
    except OSError as error:
        return BuildInfo(here, instructions, "", str(error))
    cuda = "" if device is None else device.lmck_device_built_for().decode()
    return BuildInfo(here, instructions, cuda)
