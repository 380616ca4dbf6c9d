"""How fast one model is on this device, learned from its steps, and how long an answer would take alone."""

from dataclasses import dataclass

from forebay.transport.messages import Sampling

SMOOTHING = 0.05
"""Weight of the newest sample."""


@dataclass(slots=True)
class Pace:
    """`decode_s`: seconds of a step of decodes; `prefill_s`: what each token of a prompt adds to a step (guesses, both,
    until there were steps). `length`: what share of the tokens that they may make answers do make."""

    decode_s: float = 0.02
    prefill_s: float = 0.0005
    length: float = 1.0

    def step(self, seconds: float, prompt_tokens: int) -> None:
        """A step took `seconds`, of which `prompt_tokens` were computed beside its decodes."""
        if prompt_tokens:
            sample = max(0.0, seconds - self.decode_s) / prompt_tokens
            self.prefill_s += SMOOTHING * (sample - self.prefill_s)
        else:
            self.decode_s += SMOOTHING * (seconds - self.decode_s)

    def prefill(self, seconds: float, prompt_tokens: int) -> None:
        """A step of prefills alone took `seconds`."""
        self.prefill_s += SMOOTHING * (seconds / prompt_tokens - self.prefill_s)

    def ended(self, generated: int, max_tokens: int) -> None:
        self.length += SMOOTHING * (generated / max_tokens - self.length)

    def alone_s(self, prompt_tokens: int, sampling: Sampling) -> float:
        """Seconds that such a request is expected to take on the idle device."""
        return self.prefill_s * prompt_tokens + self.decode_s * self.length * sampling.max_tokens
