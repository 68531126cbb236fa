"""Metrics and probes at a worker's port, whose libraries are imported only if there is one."""

from collections.abc import Iterator
from contextlib import contextmanager

from worker.monitoring.health import Health
from worker.monitoring.sink import MetricsSink


@contextmanager
def served_metrics(model_name: str, port: int | None, health: Health) -> Iterator[MetricsSink]:
    """Count metrics, and serve them and the probes at the port while the block runs. Without a port, drop all. Raises
    `CannotStart` if the port cannot be opened."""
    if port is None:
        yield MetricsSink()
        return
    from worker.monitoring.metrics import Metrics
    from worker.monitoring.probes import answer_probes

    metrics = Metrics(model_name)
    with answer_probes(port, metrics.registry, health):
        yield metrics
