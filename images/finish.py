"""Inside a build: compiles what was installed, lists it, and makes it the same for the same content.

Files that let code run whenever Python starts (`.pth`) are taken away: nothing here needs them.

Byte code goes by the source's hash, so that it is found with any timestamp and never looked for again: a read-only root
could not keep it. The list (`sbom.json`, CycloneDX) names every Python distribution and every Debian package.
"""

import compileall
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any

DPKG = Path("/var/lib/dpkg/status")


def python_components(folders: list[str]) -> Iterator[dict[str, Any]]:
    """Every distribution that can be imported from these folders."""
    for found in importlib.metadata.distributions(path=folders):
        name = re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower()
        component: dict[str, Any] = {
            "type": "library",
            "name": name,
            "version": found.version,
            "purl": f"pkg:pypi/{name}@{found.version.replace('+', '%2B')}",
        }
        if licence := found.metadata.get("License-Expression"):
            component["licenses"] = [{"expression": licence}]
        yield component


def debian_components(status: str) -> Iterator[dict[str, Any]]:
    """Every package that dpkg calls installed."""
    for block in status.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line and line[0] != " ")
        if fields.get("Status") == "install ok installed":
            name, version = fields["Package"], fields["Version"]
            escaped = version.replace("+", "%2B").replace(":", "%3A").replace("~", "%7E")
            yield {
                "type": "library",
                "name": name,
                "version": version,
                "purl": f"pkg:deb/debian/{name}@{escaped}?arch={fields['Architecture']}",
            }


def bill_of_materials(components: list[dict[str, Any]], timestamp: int) -> dict[str, Any]:
    """The list as CycloneDX 1.5, without anything that two builds of the same content would not share."""
    from datetime import UTC, datetime

    components = sorted(components, key=lambda component: component["purl"])
    mark = hashlib.sha256(json.dumps(components).encode()).hexdigest()
    uuid = f"{mark[:8]}-{mark[8:12]}-5{mark[13:16]}-8{mark[17:20]}-{mark[20:32]}"
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(timestamp, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {"type": "container", "name": "kvferry", "bom-ref": "kvferry"},
        },
        "components": components,
    }


def finish(folder: Path, timestamp: int) -> None:
    """Do all of it to an environment."""
    mode = PycInvalidationMode.UNCHECKED_HASH
    site = next(folder.glob("lib/python*/site-packages"))
    for hook in site.glob("*.pth"):
        hook.unlink()
    # Sources that no Python of this version can compile lie in some packages' tests.
    compileall.compile_dir(site, quiet=2, force=True, workers=1, invalidation_mode=mode)
    components: list[dict[str, Any]] = [
        {"type": "application", "name": "python", "version": platform.python_version(), "purl": _python()},
        *python_components([str(site)]),
        *(debian_components(DPKG.read_text("utf-8", "replace")) if DPKG.exists() else ()),
    ]
    bill = bill_of_materials(components, timestamp)
    (folder / "sbom.json").write_text(json.dumps(bill, indent=1) + "\n", "utf-8")
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (timestamp, timestamp), follow_symlinks=False)


def _python() -> str:
    return f"pkg:generic/python@{platform.python_version()}"


if __name__ == "__main__":
    finish(Path(sys.argv[1]), int(os.environ["SOURCE_DATE_EPOCH"]))
