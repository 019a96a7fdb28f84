"""Makes the backends beside this file importable, also for the processes that crash tests kill."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["pytester"]
