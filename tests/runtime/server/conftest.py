"""One pod for all tests that leave it as it was."""

from collections.abc import Iterator

import pytest

from tests.runtime.server.harness import PodProcess, running_pod


@pytest.fixture(scope="session")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodProcess]:
    """A pod with keys, both roles, 255 blocks, 5 ms a step."""
    folder = tmp_path_factory.mktemp("pod")
    with running_pod(folder, "--kv-blocks", "255", "--max-model-len", "2048", model="toy:step_ms=5") as running:
        yield running
