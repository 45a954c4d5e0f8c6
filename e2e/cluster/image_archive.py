#!/usr/bin/env python3
"""Write an image as an archive that `docker load`, `ctr images import` and `kind load image-archive` take.

    image_archive.py OUT.tar [--tag NAME:TAG]... [--entrypoint A,B] [--env K=V]... [--user UID] LAYER...

Every LAYER is a folder that becomes one layer. Owners are root and times are zero, so that equal folders make equal
layers, which a store keeps once.
"""

import argparse
import hashlib
import io
import json
import os
import platform
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CHUNK = 2**20


class Hashing(io.RawIOBase):
    """Passes bytes on and keeps their SHA-256."""

    def __init__(self, target: IO[bytes]) -> None:
        self.target, self.digest = target, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, content: bytes) -> int:  # type: ignore[override]
        self.digest.update(content)
        return self.target.write(content)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime = member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def write_layer(folder: Path, target: IO[bytes]) -> str:
    """Write a folder as a layer; returns the layer's digest in hex."""
    hashing = Hashing(target)
    with tarfile.open(fileobj=hashing, mode="w|", format=tarfile.PAX_FORMAT, bufsize=CHUNK) as archive:
        for place, folders, files in os.walk(folder):
            folders.sort()
            for name in sorted([*folders, *files]):
                path = Path(place) / name
                archive.add(path, str(path.relative_to(folder)), recursive=False, filter=_plain)
    return hashing.digest.hexdigest()


def write_image(
    out: Path,
    layers: Sequence[Path],
    *,
    tags: Sequence[str] = (),
    entrypoint: Sequence[str] = (),
    env: Sequence[str] = (),
    user: str = "",
) -> None:
    """Write an image of these folders, the lowest layer first.

    Args:
        env: ``NAME=value``; a PATH is put before the usual folders.
        user: whom its processes run as; root if empty.
    """
    settings: dict[str, object] = {"Env": list(env)}
    if not any(entry.startswith("PATH=") for entry in env):
        settings["Env"] = [f"PATH={PATH}", *env]
    if entrypoint:
        settings["Entrypoint"] = list(entrypoint)
    if user:
        settings["User"] = user
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch, tarfile.open(out, "w") as archive:
        written: list[tuple[str, Path]] = []
        for number, folder in enumerate(layers):
            path = Path(scratch) / str(number)
            with path.open("wb") as layer:
                written.append((write_layer(folder, layer), path))
        config = json.dumps(
            {
                "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
                "os": "linux",
                "config": settings,
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest, _ in written]},
            },
            sort_keys=True,
        ).encode()
        name = f"{hashlib.sha256(config).hexdigest()}.json"
        manifest = [{"Config": name, "RepoTags": list(tags), "Layers": [f"{digest}.tar" for digest, _ in written]}]
        _add(archive, "manifest.json", json.dumps(manifest).encode())
        _add(archive, name, config)
        for digest, path in written:
            archive.add(path, f"{digest}.tar", filter=_plain)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("layers", type=Path, nargs="+", metavar="LAYER")
    parser.add_argument("--tag", action="append", default=[])
    parser.add_argument("--entrypoint", default="", help="comma-separated")
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("--user", default="")
    args = parser.parse_args()
    entrypoint = args.entrypoint.split(",") if args.entrypoint else []
    write_image(args.out, args.layers, tags=args.tag, entrypoint=entrypoint, env=args.env, user=args.user)


if __name__ == "__main__":
    main()
