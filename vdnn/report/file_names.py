"""Names of files and anchors, made from arbitrary names."""

from __future__ import annotations

import hashlib
import re

_OTHERS = re.compile(r"[^a-z0-9]+")
_LONGEST = 80


def file_name(*parts: str) -> str:
    """A name of lower-case letters, digits and dashes. A hash is appended if other texts could give the same name."""
    text = " ".join(parts)
    short = _OTHERS.sub("-", text.lower()).strip("-")[:_LONGEST]
    plain = _OTHERS.sub(" ", text).strip()
    if short and plain == text.replace(",", "").replace("  ", " ") and len(short) < _LONGEST:
        return short
    return f"{short or 'unnamed'}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
