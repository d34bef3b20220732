"""docker-compose.yml as Docker Compose itself reads it. No engine has a part in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COMPOSE = Path(sys.executable).with_name("docker-compose")


def make_env(folder: Path) -> Path:
    """`make .env` in `folder`: .env.example with made secrets. Returns the file."""
    (folder / ".env.example").write_text((ROOT / ".env.example").read_text())
    subprocess.run(["make", "--silent", f"--file={ROOT / 'Makefile'}", ".env"], cwd=folder, check=True)
    return folder / ".env"


def compose_config(env_file: Path, *overrides: str, profile: str = "*") -> subprocess.CompletedProcess[str]:
    """`docker-compose config` with these variables only; its output is JSON."""
    files = [f"--file={ROOT / name}" for name in ("docker-compose.yml", *overrides)]
    options = [f"--project-directory={ROOT}", f"--env-file={env_file}", f"--profile={profile}"]
    command = [str(COMPOSE), *files, *options, "config", "--format=json"]
    return subprocess.run(command, env={"PATH": "", "HOME": "/"}, capture_output=True, text=True)


def services(env_file: Path, *overrides: str, profile: str = "*") -> dict[str, dict[str, Any]]:
    """The services by name, with anchors, variables and overrides resolved as for an engine."""
    done = compose_config(env_file, *overrides, profile=profile)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.replace("$$", "$"))["services"]
    return found
