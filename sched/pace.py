"""How fast one model is on this device, learned from its steps, and how long an answer would take alone."""

from dataclasses import dataclass

SMOOTHING = 0.03
"""Weight of the newest sample, once there were as many as this says."""

SPREAD = 0.01
"""Steps tell what a token costs by how much they differ in tokens. Where their variance is not well above this part of
their mean squared, they do not, and tokens are taken to cost nothing: what a step takes is then all that is known."""

SLOWEST = 3.0
"""A step counts as at most so many times what was expected: one that waited for something else says little."""

TRUSTED = 10
"""Steps after which what is expected is known well enough for that."""

LEAST_S = 1e-6
"""No step takes less: from nothing, `SLOWEST` would lead nowhere."""


@dataclass(slots=True)
class Pace:
    """A step takes `step_s` seconds, and `token_s` for each token that it computes, of prompts and of answers alike:
    the least-squares line through the steps, of which older ones count less. Before the first step both are guesses."""

    step_s: float = 0.02
    token_s: float = 0.0005
    _steps: int = 0
    _tokens: float = 0.0
    _seconds: float = 0.0
    _variance: float = 0.0
    _covariance: float = 0.0

    def step(self, seconds: float, tokens: int) -> None:
        """A step that computed so many tokens took `seconds`."""
        if self._steps >= TRUSTED:
            seconds = min(seconds, SLOWEST * (self.step_s + self.token_s * tokens))
        self._steps += 1
        weight = max(SMOOTHING, 1 / self._steps)
        apart = tokens - self._tokens
        self._tokens += weight * apart
        self._seconds += weight * (seconds - self._seconds)
        self._variance = (1 - weight) * (self._variance + weight * apart * apart)
        rest = seconds - self._seconds
        self._covariance = (1 - weight) * self._covariance + weight * apart * rest
        known = self._variance + SPREAD * self._tokens * self._tokens
        # No line may go below zero where there are no tokens: then all of the time is the tokens'.
        self.token_s = min(max(0.0, self._covariance / known), self._seconds / self._tokens) if known else 0.0
        self.step_s = max(LEAST_S, self._seconds - self.token_s * self._tokens)

    def alone_s(self, pending: int, tokens: int) -> float:
        """Seconds that it takes on the idle device to compute `pending` tokens of a sequence and then to make `tokens`
        (at least one), of which the first comes with them."""
        return tokens * self.step_s + (pending + tokens - 1) * self.token_s
