"""How long to wait before something that failed is tried again."""

FIRST_S = 0.25
LONGEST_S = 10.0
LONGEST_UNUSABLE_S = 30.0
"""Where a person has to remove the cause first (a file, a neighbour's memory, a daemon)."""

STABLE_S = 60.0
"""A process that lived this long dies of something new: the count begins anew."""


def restart_delay(deaths: int, longest_s: float = LONGEST_S) -> float:
    """Seconds before the restart after that many deaths in a row (at least one): doubles up to a bound."""
    if deaths < 1:
        raise ValueError(f"deaths is at least 1, not {deaths}")
    return float(min(longest_s, FIRST_S * 2 ** min(deaths - 1, 10)))
