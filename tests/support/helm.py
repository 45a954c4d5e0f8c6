"""Helm, of either major version, on our chart."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from tests.support.kube_client import Object

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "kvferry"
KUBE_VERSION = "1.36.0"
COMMAND_S = 100.0

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the quicker of the two where it is built

Version = Literal["helm3", "helm4"]


class HelmError(Exception):
    """What Helm said when it failed."""


class Helm:
    """One version.

    Args:
        tools: the folder with helm3 and helm4.
        folder: for its caches, and for the files that it is given.
        kubeconfig: of the cluster; ``None`` for what needs none.
    """

    def __init__(self, tools: Path, version: Version, folder: Path, kubeconfig: Path | None = None) -> None:
        self.version = version
        self._program = tools / version
        self._folder = folder
        self._kubeconfig = kubeconfig

    def __call__(self, *arguments: str, values: Mapping[str, Any] | None = None) -> str:
        """Run a command; returns its standard output. Raises ``HelmError``."""
        command = [str(self._program), *arguments]
        if values is not None:
            path = self._folder / "values.json"
            path.write_text(json.dumps(values))
            command.append(f"--values={path}")
        homes = {f"HELM_{name}_HOME": str(self._folder / name.lower()) for name in ("CACHE", "CONFIG", "DATA")}
        env = {**os.environ, **homes, "KUBECONFIG": str(self._kubeconfig or self._folder / "none")}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=COMMAND_S, check=False)
        if done.returncode:
            raise HelmError(done.stderr or done.stdout)
        return done.stdout

    def template(
        self,
        values: Mapping[str, Any] | None = None,
        *,
        release: str = "kvferry",
        namespace: str = "kvferry-system",
        chart: Path = CHART,
    ) -> list[Object]:
        """The chart's objects, rendered without a cluster."""
        text = self(
            "template", release, str(chart), f"--namespace={namespace}", f"--kube-version={KUBE_VERSION}", values=values
        )
        return [found for found in yaml.load_all(text, Loader=LOADER) if found]
