"""Which requests the scheduler takes, and what it says to the others."""

from collections.abc import Mapping

from forebay.sched.central_state import Model
from forebay.sched.overview import hopeless
from forebay.transport.messages import RejectKind, Submit


def refusal(
    submit: Submit, models: Mapping[str, Model], draining: bool, queue_bound: int
) -> tuple[RejectKind, str] | None:
    """Why a request is not taken, or None. One that comes back after a loss is neither too late nor one too many."""
    model = models.get(submit.model)
    if model is None:
        names = ", ".join(models) or "none: this scheduler has no configuration"
        return "unknown_model", f"there is no model {submit.model!r} here (there is: {names})"
    if reason := hopeless(model):
        return "failed", reason
    if draining and submit.epoch == 0:
        return "draining", "the server is shutting down and takes no new requests"
    if not model.was_ready:
        return "not_ready", f"model {submit.model!r} is not loaded yet; try again in a moment"
    if submit.prompt_tokens + submit.sampling.max_tokens > model.max_context:
        return "context_too_long", too_long(model, submit)
    if submit.epoch == 0 and len(model.queue) >= queue_bound:
        return "queue_full", (
            f"{len(model.queue)} requests wait for model {submit.model!r} already (queue_bound: {queue_bound}); "
            "try again later"
        )
    return None


def too_long(model: Model, submit: Submit) -> str:
    wanted = submit.prompt_tokens + submit.sampling.max_tokens
    return (
        f"the prompt has {submit.prompt_tokens} tokens and max_tokens is {submit.sampling.max_tokens}: "
        f"{wanted} together, where {submit.model!r} holds {model.max_context}"
    )
