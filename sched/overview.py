"""What the central core says of its models and workers to others."""

from collections.abc import Mapping

from forebay.sched.central_state import Model, Worker
from forebay.transport.messages import ModelState, ModelStatus, WorkerStatus

Workers = Mapping[str, Worker]


def hopeless(model: Model) -> str:
    """Why no replica of the model will ever be ready, or nothing where one may."""
    if len(model.replicas) < len(model.gpus):
        return ""
    reason = ""
    for replica in model.replicas.values():
        if replica.state != "failed" or replica.again_at is not None:
            return ""
        reason = reason or replica.reason
    return f"model {model.spec.name!r} could not be loaded: {reason}"


def model_statuses(models: Mapping[str, Model], workers: Workers) -> tuple[ModelStatus, ...]:
    return tuple(_model_status(model, workers) for model in models.values())


def worker_statuses(workers: Workers, draining: bool) -> tuple[WorkerStatus, ...]:
    return tuple(
        WorkerStatus(
            worker.id,
            worker.gpu,
            worker.pid,
            "draining" if draining else worker.status,
            tuple(name for name, replica in worker.replicas.items() if replica.state == "ready"),
            len(worker.requests),
            worker.given,
        )
        for worker in workers.values()
    )


def _model_status(model: Model, workers: Workers) -> ModelStatus:
    name = model.spec.name
    replicas = model.replicas.values()
    states = {replica.state for replica in replicas}
    state: ModelState = (
        "ready"
        if "ready" in states
        else "loading"
        if "loading" in states
        else "failed"
        if hopeless(model)
        else "waiting"
    )
    return ModelStatus(
        name,
        model.spec.path,
        state,
        model.was_ready,
        model.max_context,
        sum(replica.state == "ready" for replica in replicas),
        len(model.queue),
        sum(workers[peer].held(name) for peer in model.replicas),
        next((replica.reason for replica in replicas if replica.reason), ""),
        model.prompt_tokens,
        model.cached_tokens,
        model.evictions,
        model.restores,
        model.restore_seconds,
    )
