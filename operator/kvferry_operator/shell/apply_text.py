"""The body of a server-side apply: JSON that is YAML as well, since the API server reads it as YAML."""

import json
import re
from typing import Any

# YAML takes no characters in two halves as escapes, so that JSON in plain ASCII will not do; and these only as escapes,
# since they are control characters or line breaks to it.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def apply_text(body: Any) -> bytes:
    """The text of an object whose strings hold any characters."""
    text = json.dumps(body, ensure_ascii=False)
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()
