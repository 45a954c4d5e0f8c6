"""A wrong value is refused before anything is installed, with its place and what is accepted."""

from typing import Any

import pytest

from tests.apiserver.chart.values import PROFILES, WRONG
from tests.support.helm import CHART, Helm, HelmError


@pytest.mark.parametrize(("values", "said"), WRONG, ids=[said[:60] for _, said in WRONG])
def test_a_wrong_value_is_told_with_its_place(helm: Helm, values: dict[str, Any], said: str) -> None:
    """Misspelt, of another type, out of range, contradicting another one."""
    with pytest.raises(HelmError) as caught:
        helm.template(values)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", PROFILES)
def test_lint_has_nothing_to_say(helm: Helm, name: str) -> None:
    """Also not a warning."""
    told = helm("lint", "--strict", str(CHART), values=PROFILES[name])
    assert "[WARNING]" not in told
    assert "[ERROR]" not in told


def test_what_a_user_may_set_from_the_command_line(helm: Helm) -> None:
    """Values given by `--set` have the types that the schema asks for."""
    arguments = ["--set=replicas=2", "--set=watchNamespaces={a,b}", "--set=ingresses.enabled=true"]
    assert "--namespaces=a,b" in helm("template", "kvferry", str(CHART), *arguments)
