"""Types of command-line options: each refuses a bad value by saying what is allowed."""

import argparse
import math
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

from forebay.bench.errors import BenchError
from forebay.bench.limits import LEAST_RATE, MOST_RATE


def positive_float(text: str) -> float:
    value = _number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; a number above 0 is")
    return value


def non_negative_float(text: str) -> float:
    value = _number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; a number of 0 or more is")
    return value


def number(least: float, most: float) -> Callable[[str], float]:
    def convert(text: str) -> float:
        value = _number(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed; a number from {least:g} to {most:,g} is")
        return value

    return convert


def whole(least: int, most: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        # No more digits than `int` takes.
        if not text.isdecimal() or len(text) > 18 or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed; a whole number from {least} to {most:,} is")
        return int(text)

    return convert


def whole_list(least: int, most: int) -> Callable[[str], list[int]]:
    """Whole numbers separated by commas, in the order given."""
    one = whole(least, most)
    return lambda text: [one(part) for part in text.split(",")]


rate = number(LEAST_RATE, MOST_RATE)
"""Requests per second."""

factor = number(1e-6, 1e6)


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; a whole number of 1 or more is")
    return int(text)


def non_negative_int(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; a whole number of 0 or more is")
    return int(text)


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; a port from 0 to 65535 is")
    return int(text)


def base_url(text: str) -> str:
    """Where a server answers: a scheme and a host, and usually a port."""
    scheme, separator, _ = text.partition("://")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} lacks its scheme; http://{text} is allowed")
    if scheme not in ("http", "https"):
        raise argparse.ArgumentTypeError(f"{text!r} begins with {scheme}://; http:// and https:// are allowed")
    try:
        parts = urlsplit(text)
        usable = bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise argparse.ArgumentTypeError(f"{text!r} has no usable host and port; {scheme}://127.0.0.1:8080 is allowed")
    return text


def share(text: str) -> float:
    """Above 0 and at most 1."""
    value = positive_float(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; a share above 0 and at most 1 is, such as 0.99")
    return value


def scales(text: str) -> list[float]:
    """Numbers above 0, separated by commas, made ascending and unique."""
    return sorted({positive_float(part) for part in text.split(",")})


T = TypeVar("T")


def parsed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Turns a parser that raises BenchError into an option type."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except BenchError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value
