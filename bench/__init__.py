"""Workloads, replay, measurements, reports. Nothing imports it."""
