"""Values that several command lines take, as types for argparse: a wrong one ends the program before it starts."""

import re
from argparse import ArgumentTypeError

from forebay.transport.addresses import LAST_PORT


def port(text: str) -> int:
    """A TCP port, 0 being any free one. Raises ArgumentTypeError."""
    if re.fullmatch("[0-9]{1,5}", text) is None or int(text) > LAST_PORT:
        raise ArgumentTypeError(f"{text!r} is no port; allowed are 0 to {LAST_PORT} (0: any free one)")
    return int(text)
