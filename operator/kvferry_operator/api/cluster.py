"""A service as an API server has it, as the manifest's types."""

from typing import Any

from kvferry_operator.api.faults import LineLookup
from kvferry_operator.api.service import InferenceService
from kvferry_operator.api.validate import validated


def load_object(found: dict[str, Any]) -> InferenceService:
    """Check an object of the API server.

    Status and what the server keeps in the metadata are left out, and so are labels and annotations of the object:
    nothing is planned from them, and tools write what they like there.

    Raises:
        ManifestError: an object older than a rule of its CRD may break it.
    """
    metadata = {name: found["metadata"][name] for name in ("name", "namespace") if name in found["metadata"]}
    data = {"apiVersion": found["apiVersion"], "kind": found["kind"], "metadata": metadata, "spec": found.get("spec")}
    return validated(data, "object", LineLookup({}))
