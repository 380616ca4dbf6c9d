"""What the central core says of its models and workers to others."""

from collections.abc import Collection, Mapping

from forebay.sched.central_state import Model, Worker
from forebay.transport.messages import ModelState, ModelStatus, WorkerStatus

Workers = Collection[Worker]


def hopeless(model: Model, workers: Workers) -> str:
    """Why no replica of the model will ever be ready, or nothing where one may."""
    name = model.spec.name
    replicas = [replica for worker in workers if (replica := worker.replicas.get(name)) is not None]
    if len(replicas) < len(model.gpus) or any(replica.state != "failed" for replica in replicas):
        return ""
    return f"model {name!r} could not be loaded: {replicas[0].reason}"


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
        )
        for worker in workers
    )


def _model_status(model: Model, workers: Workers) -> ModelStatus:
    name = model.spec.name
    replicas = [worker.replicas[name] for worker in workers if name in worker.replicas]
    states = {replica.state for replica in replicas}
    state: ModelState = (
        "ready"
        if "ready" in states
        else "loading"
        if "loading" in states
        else "failed"
        if hopeless(model, workers)
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
        sum(worker.held(name) for worker in workers),
        next((replica.reason for replica in replicas if replica.reason), ""),
        model.prompt_tokens,
        model.cached_tokens,
    )
