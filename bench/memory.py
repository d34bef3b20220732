"""Memory of this process, from the kernel's own figures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal


def resident(which: Literal["VmRSS", "VmHWM"] = "VmRSS") -> int:
    """Bytes of resident memory: now (VmRSS), or the most there ever was (VmHWM)."""
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
