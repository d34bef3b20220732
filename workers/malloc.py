"""Memory of freed tensors stays in the process: glibc hands big blocks back to the kernel at once, and the next tensor
of that size pays for each page anew, which can cost more than the arithmetic on it."""

from __future__ import annotations

import ctypes

# mallopt's parameters (malloc.h). A threshold that is set is no longer moved by what is freed.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
KEPT_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """For this process and threads that have not allocated yet; without effect where malloc is not glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_ARENA_MAX, 1)  # other arenas than the first are cut into heaps of 64 MiB, which are given back
