"""How hard the tests that draw their cases at random look: as hard as `make check` has time for, or with FOREBAY_DEEP=1
as hard as is worth an hour now and then."""

import os

DEEP = os.environ.get("FOREBAY_DEEP", "0") not in ("", "0")


def effort(usual: int, deep: int) -> int:
    """How many cases to draw: `deep` with FOREBAY_DEEP=1."""
    return deep if DEEP else usual
