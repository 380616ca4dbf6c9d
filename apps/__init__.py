"""Adapters and command lines."""
