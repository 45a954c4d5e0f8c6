"""Tables that other tests read stay as they are, whatever is drawn from them and in whatever order tests run."""

import copy

from tests.operator.manifest_fuzz import ANYTHING, Fuzz
from tests.operator.profiles import PROFILES


def test_drawing_manifests_changes_no_table() -> None:
    """Profiles and values are equal before and after; a manifest that is drawn is nobody else's."""
    before = copy.deepcopy((PROFILES, ANYTHING))
    fuzz = Fuzz(7)
    for _ in range(500):
        fuzz.manifest()["spec"].clear()
    assert before == (PROFILES, ANYTHING)
