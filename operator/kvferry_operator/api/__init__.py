"""The manifest: pydantic types of ``InferenceService`` and the loader that reports every fault with its line.

Pure: neither kopf nor a Kubernetes client is imported here. The command line and the operator use the same types.
"""

from kvferry_operator.api.faults import Fault, ManifestError
from kvferry_operator.api.load import MAX_MANIFEST_BYTES, load_manifest
from kvferry_operator.api.service import API_VERSION, KIND, InferenceService

__all__ = [
    "API_VERSION",
    "KIND",
    "MAX_MANIFEST_BYTES",
    "Fault",
    "InferenceService",
    "ManifestError",
    "load_manifest",
]
