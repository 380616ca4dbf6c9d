"""The bytes of what lane cores and runners say to each other, which are in journals."""

import msgspec

from forebay.transport.messages import DeviceSettings, StepPlan, Targets, Work

WORK = Work(7, 32, 1, 2, (5,), True)


def test_a_step_plan_on_the_wire() -> None:
    assert msgspec.msgpack.encode(StepPlan(3, "m", (WORK,), "prefill", 48)) == bytes.fromhex(
        "96a853746570506c616e03a16d91960720010291 05c3 a77072656669 6c6c 30"
    )


def test_an_older_journals_step_and_settings_are_those_of_one_lane() -> None:
    older = msgspec.msgpack.encode(["StepPlan", 3, "m", [[7, 32, 1, 2, [5], True]]])
    plan = msgspec.msgpack.decode(older, type=StepPlan)
    assert (plan.lane, plan.share, plan.work) == ("mixed", 0, (WORK,))
    settings = msgspec.msgpack.decode(msgspec.msgpack.encode([1 << 30]), type=DeviceSettings)
    assert (settings.partition, settings.targets, settings.costs) == ("auto", {}, "")
    whole = DeviceSettings(1, partition="green", targets={"m": Targets(1.0, 0.01)})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(whole), type=DeviceSettings) == whole
