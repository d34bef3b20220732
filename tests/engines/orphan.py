"""A process that starts vLLM, tells its children's ids, and waits to be killed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil

from tests.engines.conftest import make_vllm_engine

if __name__ == "__main__":
    engine = make_vllm_engine(Path(sys.argv[1]))
    children = psutil.Process().children(recursive=True)
    print("children", *(child.pid for child in children if child.name().startswith("VLLM")), flush=True)
    time.sleep(600)
