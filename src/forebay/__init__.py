"""Forebay pools the SMs and the memory of a few GPUs for everything that runs on them."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("forebay")
except PackageNotFoundError:  # run from a source tree that nobody installed
    __version__ = "0+unknown"
