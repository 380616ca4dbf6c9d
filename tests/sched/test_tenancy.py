"""Weights that come and go: who comes, who makes room, that nobody starves and that nothing that is needed leaves."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay.sched.tenancy import (
    LEAST_TURN_S,
    MOST_FAILURES,
    RETRY_S,
    TURN_LOADS,
    Action,
    GiveUp,
    PutAside,
    Tenancy,
    Use,
)
from forebay.transport.messages import EvictWeights, RestoreWeights
from tests.effort import effort

IDLE, WAITING, RUNNING = Use(False, False), Use(True, False), Use(True, True)


class Models:
    """Carries out what is decided, at once unless a test says otherwise."""

    def __init__(self, budget: int, sizes: dict[str, int], popularity: dict[str, float] | None = None) -> None:
        self.tenancy = Tenancy(budget)
        for name, size in sizes.items():
            self.tenancy.add(name, size, (popularity or {}).get(name, 1.0))
        self.uses = dict.fromkeys(sizes, IDLE)
        self.now = 0.0

    def decide(self, after: float = 0.0, **uses: Use) -> list[Action]:
        self.now += after
        self.uses |= uses
        actions = self.tenancy.decide(self.now, self.uses)
        self.tenancy.check([name for name, use in self.uses.items() if use.holding])
        return actions

    def settle(self, load_s: float = 0.1, **uses: Use) -> list[Action]:
        """Decides and answers until nothing is to be done."""
        done = []
        while actions := self.decide(**uses):
            uses = {}
            done += actions
            for action in actions:
                match action:
                    case RestoreWeights(model):
                        self.now += load_s
                        self.tenancy.back(self.now, model, load_s)
                    case EvictWeights(model):
                        self.tenancy.gone(model)
                    case PutAside(model):
                        self.uses[model] = WAITING
                    case GiveUp(model, _):
                        self.uses[model] = IDLE
        return done

    def there(self) -> set[str]:
        return {name for name in self.uses if self.tenancy.runs(name)}


def test_room_that_is_free_is_filled_before_anybody_asks_in_the_order_of_the_configuration() -> None:
    models = Models(25, {"a": 10, "b": 10, "c": 10, "d": 5})
    assert models.settle() == [RestoreWeights(name) for name in ("a", "b", "d")]


def test_a_popular_model_comes_before_others_when_nobody_asks() -> None:
    models = Models(10, {"a": 10, "b": 10}, {"b": 2.0})
    assert models.settle() == [RestoreWeights("b")]


def test_a_request_for_a_model_that_is_away_brings_it_in_the_place_of_the_least_recently_used() -> None:
    models = Models(20, {"a": 10, "b": 10, "c": 10})
    models.settle()
    for name in "ab":
        models.settle(**{name: RUNNING})
        models.decide(1.0, **{name: IDLE})
    assert models.settle(c=WAITING) == [EvictWeights("a"), RestoreWeights("c")]


def test_a_popular_model_stays_though_another_was_used_later() -> None:
    models = Models(20, {"a": 10, "b": 10, "c": 10}, {"a": 20.0})
    models.settle()
    for name in "ab":
        models.settle(**{name: RUNNING})
        models.decide(1.0, **{name: IDLE})
    assert models.settle(c=WAITING)[0] == EvictWeights("b")


def test_no_more_goes_than_must() -> None:
    models = Models(30, {"small": 5, "large": 25, "new": 20})
    models.settle()
    models.decide(1.0, small=RUNNING)
    models.decide(1.0, small=IDLE, large=RUNNING)
    models.decide(1.0, large=IDLE)
    assert models.settle(new=WAITING)[0] == EvictWeights("large"), "the small one alone would not do"


def test_a_model_with_something_to_do_has_its_turn_before_it_makes_room_and_then_drains() -> None:
    models = Models(10, {"a": 10, "b": 10})
    models.settle(load_s=0.2)
    came = models.now
    assert models.decide(a=RUNNING, b=WAITING) == []
    models.now = came + TURN_LOADS * 0.2 - 0.01
    assert models.decide() == []
    assert models.tenancy.admits("a")
    assert models.decide(0.02) == []
    assert models.tenancy.runs("a")
    assert not models.tenancy.admits("a"), "it drains"
    assert models.decide(0.1) == []
    assert models.decide(0.11) == [PutAside("a")], "what runs has had the time of a load to end"
    assert models.decide(0.01, a=WAITING) == [EvictWeights("a")]
    models.tenancy.gone("a")
    assert models.decide() == [RestoreWeights("b")]


def test_what_ends_by_itself_while_its_model_drains_is_not_put_aside() -> None:
    models = Models(10, {"a": 10, "b": 10})
    models.settle()
    models.decide(100, a=RUNNING, b=WAITING)
    assert models.decide(0.01, a=IDLE) == [EvictWeights("a")]


def test_a_model_that_drains_stays_when_whoever_waited_is_gone() -> None:
    models = Models(10, {"a": 10, "b": 10})
    models.settle()
    assert models.decide(100, a=RUNNING, b=WAITING) == []
    assert not models.tenancy.admits("a")
    assert models.decide(0.001, b=IDLE) == []
    assert models.tenancy.admits("a")


def test_a_step_in_flight_of_a_model_without_requests_keeps_its_weights() -> None:
    models = Models(10, {"a": 10, "b": 10})
    models.settle()
    assert models.decide(a=Use(False, True), b=WAITING) in ([], [PutAside("a")])
    assert models.decide(a=IDLE) == [EvictWeights("a")]


def test_those_that_wait_come_in_the_order_in_which_they_began_to() -> None:
    models = Models(10, dict.fromkeys("abcd", 10))
    models.settle()
    for name in "dbc":
        models.decide(0.01, a=RUNNING, **{name: WAITING})
    order = []
    while len(order) < 3:
        models.now += 10
        order += [action.model for action in models.settle() if isinstance(action, RestoreWeights)]
    assert order == ["d", "b", "c"]


def test_small_models_do_not_keep_a_large_one_out() -> None:
    models = Models(20, {"a": 10, "b": 10, "large": 20, "c": 10})
    models.settle()
    came = models.now
    models.decide(a=RUNNING, b=IDLE, large=WAITING)
    assert models.decide(0.001, c=WAITING) == [], "the large one is first, though the small one would fit"
    models.now = came + 10
    models.settle()  # a drains
    models.now += 1
    assert next(a.model for a in models.settle() if isinstance(a, RestoreWeights)) == "large"


def test_loads_are_one_after_the_other_and_room_is_made_for_one_more_meanwhile() -> None:
    models = Models(30, dict.fromkeys("abcdef", 10))
    models.settle()
    actions = models.decide(d=WAITING, e=WAITING, f=WAITING)
    assert actions == [EvictWeights("a"), EvictWeights("b")]
    models.tenancy.gone("a")
    models.tenancy.gone("b")
    assert models.decide() == [RestoreWeights("d")]
    models.tenancy.back(models.now, "d", 0.1)
    assert models.decide(d=RUNNING) == [RestoreWeights("e"), EvictWeights("c")]


def test_a_load_that_fails_is_tried_again_later_and_then_its_requests_fail_with_the_reason() -> None:
    models = Models(10, {"a": 10})
    models.uses["a"] = WAITING
    for attempt in range(MOST_FAILURES):
        assert models.decide() == [RestoreWeights("a")]
        models.tenancy.failed(models.now, "a", "no memory")
        if attempt < MOST_FAILURES - 1:
            assert models.decide() == []
            models.now += RETRY_S * 2**attempt
    assert models.decide() == [GiveUp("a", "no memory")]
    assert models.decide(a=IDLE) == []
    assert models.decide(0.1, a=WAITING) == [RestoreWeights("a")], "a new request is a new try"


def test_a_load_that_fails_does_not_hold_up_the_next_model() -> None:
    models = Models(10, {"a": 10, "b": 10})
    models.decide(a=WAITING, b=WAITING)
    models.tenancy.failed(models.now, "a", "no memory")
    assert models.decide() == [RestoreWeights("b")]


def test_weights_that_do_not_leave_stay_and_others_go_in_their_place() -> None:
    models = Models(20, {"a": 10, "b": 10, "c": 10})
    models.settle()
    assert models.decide(c=WAITING) == [EvictWeights("a")]
    models.tenancy.failed(models.now, "a", "no memory on the host")
    assert models.tenancy.admits("a")
    assert models.settle() == [EvictWeights("b"), RestoreWeights("c")]


def test_where_nobody_can_leave_the_requests_fail_with_the_reason() -> None:
    models = Models(10, {"a": 10, "b": 10})
    models.settle()
    models.uses["b"] = WAITING
    for _ in range(MOST_FAILURES):
        assert models.decide(60) == [EvictWeights("a")]
        models.tenancy.failed(models.now, "a", "no memory on the host")
    assert models.decide() == [GiveUp("b", "no memory on the host")]


def test_counts_are_by_model() -> None:
    models = Models(10, {"a": 10, "b": 10})
    models.settle(load_s=0.3)
    models.settle(load_s=0.4, b=WAITING)
    assert models.tenancy.counts("a") == (1, 1, 0.3)
    assert models.tenancy.counts("b") == (0, 1, 0.4)


def test_a_model_that_never_fits_is_refused() -> None:
    tenancy = Tenancy(10)
    with pytest.raises(ValueError, match="model 'a' has 11 bytes of weights; the device's weights_memory is 10"):
        tenancy.add("a", 11, 1.0)
    tenancy.add("a", 10, 1.0)
    with pytest.raises(ValueError, match="known already"):
        tenancy.add("a", 10, 1.0)
    with pytest.raises(ValueError, match="holds no weights"):
        Tenancy(0)
    assert tenancy.admits("a model that is always there")


class AnyOrder(RuleBasedStateMachine):
    """Requests, steps, answers and failures in any order; time passes as it likes."""

    @initialize(sizes=st.lists(st.integers(1, 10), min_size=2, max_size=6), spare=st.integers(0, 15))
    def begin(self, sizes: list[int], spare: int) -> None:
        self.now = 0.0
        self.tenancy = Tenancy(max(sizes) + spare)
        self.waiting = {str(index): 0 for index in range(len(sizes))}
        self.running = dict(self.waiting)
        self.flying = dict(self.waiting)
        self.open: dict[str, Action] = {}
        self.given_up = 0
        for name, size in zip(self.waiting, sizes, strict=True):
            self.tenancy.add(name, size, 1.0)
        self.decide()

    def uses(self) -> dict[str, Use]:
        return {
            name: Use(
                bool(self.waiting[name] + self.running[name]), bool(self.running[name] + self.flying[name])
            )
            for name in self.waiting
        }  # fmt: skip

    def decide(self) -> None:
        for action in self.tenancy.decide(self.now, self.uses()):
            match action:
                case RestoreWeights(model) | EvictWeights(model):
                    assert model not in self.open, "asked for twice"
                    assert not self.running[model] + self.flying[model]
                    self.open[model] = action
                case PutAside(model):
                    if not self.flying[model]:
                        self.waiting[model] += self.running[model]
                        self.running[model] = 0
                case GiveUp(model, reason):
                    assert reason == "boom"
                    assert not self.running[model]
                    self.waiting[model] = 0
        self.work()
        self.tenancy.check([name for name, use in self.uses().items() if use.holding])

    def work(self) -> None:
        for name in self.waiting:
            if self.tenancy.admits(name) and self.waiting[name]:
                self.running[name] += self.waiting[name]
                self.waiting[name] = 0
            if self.tenancy.runs(name) and self.running[name] and not self.flying[name]:
                self.flying[name] = 1

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        self.waiting[data.draw(st.sampled_from(sorted(self.waiting)))] += 1
        self.decide()

    @precondition(lambda self: any(self.flying.values()))
    @rule(data=st.data(), ends=st.booleans())
    def land(self, data: st.DataObject, ends: bool) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, count in self.flying.items() if count)))
        self.flying[name] = 0
        if ends:
            self.running[name] = max(0, self.running[name] - 1)
        self.decide()

    @precondition(lambda self: self.open)
    @rule(data=st.data(), fails=st.booleans(), seconds=st.floats(0, 2))
    def answer(self, data: st.DataObject, fails: bool, seconds: float) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        self.reply(name, fails, seconds)

    def reply(self, name: str, fails: bool, seconds: float) -> None:
        action = self.open.pop(name)
        if fails:
            self.tenancy.failed(self.now, name, "boom")
        elif isinstance(action, RestoreWeights):
            self.tenancy.back(self.now, name, seconds)
        else:
            self.tenancy.gone(name)
        self.decide()

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """All requests of a model are given up by their clients; a step may still be on its way."""
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        self.waiting[name] = self.running[name] = 0
        self.decide()

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.decide()

    @invariant()
    def at_most_one_comes(self) -> None:
        assert sum(isinstance(action, RestoreWeights) for action in getattr(self, "open", {}).values()) <= 1

    def teardown(self) -> None:
        """From wherever it got to: whoever waits is served."""
        if not hasattr(self, "tenancy"):
            return
        for _ in range(400):
            self.now += 1.0
            for name in sorted(self.open):
                if name in self.open:
                    self.reply(name, False, 0.5)
            for name in [name for name, count in self.flying.items() if count]:
                self.flying[name] = 0
                self.running[name] = max(0, self.running[name] - 1)
            self.decide()
            if not any(self.waiting.values()) and not any(self.running.values()):
                return
        raise AssertionError(f"{self.waiting} wait for ever")


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=effort(25, 100), stateful_step_count=40, deadline=None)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 8), min_size=2, max_size=8),
    spare=st.integers(0, 12),
    load=st.floats(0.01, 0.5),
    seed=st.randoms(use_true_random=False),
)
def test_whoever_waits_comes_within_a_bound_though_everybody_is_always_busy(
    sizes: list[int], spare: int, load: float, seed: random.Random
) -> None:
    """Every model always has requests and would never end by itself. A round of turns bounds everybody's wait: before
    it is a model's turn every other one has at most one, and drains and leaves after it."""
    budget = max(sizes) + spare
    models = Models(budget, {str(index): size for index, size in enumerate(sizes)})
    models.uses = dict.fromkeys(models.uses, WAITING)
    step = 0.05
    ready: dict[str, float] = {}
    since = dict.fromkeys(models.uses, 0.0)
    turn = max(LEAST_TURN_S, TURN_LOADS * load) + load + step
    bound = (len(sizes) + 1) * (turn + 2 * load + 4 * step)
    while models.now < 4 * bound:
        for action in models.decide(step):
            match action:
                case RestoreWeights(model):
                    ready[model] = models.now + load
                case EvictWeights(model):
                    ready[model] = models.now + step * seed.random()
                case PutAside(model):
                    models.uses[model] = WAITING
        for model in [model for model, at in ready.items() if at <= models.now]:
            del ready[model]
            if models.tenancy._tenants[model].state == "coming":
                models.tenancy.back(models.now, model, load)
            else:
                models.tenancy.gone(model)
                since[model] = models.now
        for model in models.uses:
            if models.tenancy.admits(model):
                models.uses[model] = RUNNING
            if models.tenancy.runs(model):
                since[model] = models.now
            assert models.now - since[model] <= bound, f"{model} has waited for {models.now - since[model]:.2f} s"
