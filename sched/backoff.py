"""How long to wait before a process that died is started again."""

FIRST_S = 0.25
LONGEST_S = 10.0
STABLE_S = 60.0
"""A process that lived this long dies of something new: the count begins anew."""


def restart_delay(deaths: int) -> float:
    """Seconds before the restart after that many deaths in a row (at least one): doubles up to a bound."""
    if deaths < 1:
        raise ValueError(f"deaths is at least 1, not {deaths}")
    return float(min(LONGEST_S, FIRST_S * 2 ** min(deaths - 1, 10)))
