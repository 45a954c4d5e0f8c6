"""Helm 3 and Helm 4, each on its own; where they are absent, the tests are skipped with the reason."""

import pytest

from tests.support.cluster_tools import tools_or_skip
from tests.support.helm import Helm


@pytest.fixture(params=["helm3", "helm4"], scope="session")
def helm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Helm without a cluster."""
    return Helm(tools_or_skip("helm"), request.param, tmp_path_factory.mktemp(request.param))
