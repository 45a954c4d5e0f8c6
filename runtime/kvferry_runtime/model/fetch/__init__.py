"""Gets a model onto this machine: the demo model by its name, one of the Hugging Face hub, of a web server or of an S3
bucket, or a folder as it is. What lies under its name is whole, compared with what its source says of it, and opened
once as the engine opens it.
"""

from kvferry_runtime.model.fetch.errors import FetchError
from kvferry_runtime.model.fetch.options import Fetched, FetchOptions
from kvferry_runtime.model.fetch.place import default_root
from kvferry_runtime.model.fetch.sources import fetch, get

__all__ = ["FetchError", "FetchOptions", "Fetched", "default_root", "fetch", "get"]
