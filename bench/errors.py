"""The error that a person can mend: a bad file, a bad option, a server that does not fit the workload."""


class BenchError(Exception):
    """Its text says what is wrong, where, what is allowed and what to do. Command lines print it and exit with 1."""


class Interrupted(BenchError):
    """Stopped by a signal before there was anything to report."""
