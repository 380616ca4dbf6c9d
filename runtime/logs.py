"""One log for all processes: lines for people on a terminal, JSON elsewhere. Standard error only: standard output is
for results."""

import logging
import sys
from typing import Any

import structlog


def set_up(process: str) -> Any:
    """Configures structlog, and the standard library's logging to go through it. Returns this process's logger."""
    terminal = sys.stderr.isatty()
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S.%f" if terminal else "iso", utc=not terminal),
        structlog.processors.StackInfoRenderer(),
    ]
    renderer = (
        [structlog.dev.ConsoleRenderer()]
        if terminal
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        # Whole lines at once: several processes write to one pipe.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    structlog.contextvars.bind_contextvars(process=process)
    return structlog.get_logger()
