"""Processes: scheduler, worker, front door; their supervision, configuration and journal."""
