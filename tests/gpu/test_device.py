"""Devices: names, opening, loading side by side, and closing without a trace."""

import gc
import os
import subprocess
import sys
import threading

import pytest
import torch

from forebay.gpu.device import DeviceName, open_device, parse_device
from forebay.gpu.errors import DeviceError, ModelLoadError
from forebay.transport.messages import DeviceSettings, ModelSpec
from tests.gpu.driver import Blocks, Driver, prompt_of, write_tiny
from tests.gpu.test_memory import descriptors, mappings

SETTINGS = DeviceSettings(memory=4 << 20, slab_bytes=1 << 20, threads=1)


def test_names_are_parsed() -> None:
    assert parse_device("cpu:0") == DeviceName("cpu", 0)
    assert parse_device("cuda:17") == DeviceName("cuda", 17)
    assert str(parse_device("cpu:3")) == "cpu:3"


@pytest.mark.parametrize(
    "name", ["", "cpu", "cpu:", "cpu:-1", "cpu:01", "tpu:0", "CPU:0", "cpu:0 ", "cpu:0\n", "cpu:99999"]
)
def test_other_names_are_refused(name) -> None:
    with pytest.raises(DeviceError, match=r"is not a device; write cpu:N or cuda:N"):
        parse_device(name)


def test_opening_says_what_is_allowed() -> None:
    with pytest.raises(DeviceError, match=r"cuda:99 (needs the package|cannot be opened|is not there)"):
        open_device("cuda:99", SETTINGS)
    with pytest.raises(DeviceError, match="memory is 5 bytes"):
        open_device("cpu:0", DeviceSettings(memory=5))
    with pytest.raises(DeviceError, match="threads is -1"):
        open_device("cpu:0", DeviceSettings(memory=4 << 20, slab_bytes=1 << 20, threads=-1))


def test_the_lane_uses_the_threads_it_was_given() -> None:
    for threads in (1, 2):
        device = open_device("cpu:0", DeviceSettings(memory=4096, slab_bytes=4096, threads=threads))
        assert device.submit(torch.get_num_threads).result(timeout=10) == threads
        device.close()


def test_models_share_weights_and_are_unloaded_one_by_one(tmp_path) -> None:
    folder = write_tiny("llama", tmp_path)
    device = open_device("cpu:0", SETTINGS)
    try:
        runners = [device.load(ModelSpec(name=name, path=str(folder))) for name in ("a", "b")]
        assert runners[0]._weights is runners[1]._weights
        with pytest.raises(ModelLoadError, match="a model of this name already"):
            device.load(ModelSpec(name="a", path=str(folder)))
        run = Driver(runners[1], Blocks(device.pool.capacity))
        request = run.open(prompt_of(10, 1))
        future = run.launch((request, 10))
        device.unload("a")
        assert future.done()
        run.finish(future, request)
        run.step((request, 1))
        telemetry = device.telemetry()
        assert telemetry.memory_total == 4 << 20
        assert 0 < telemetry.memory_resident < 4 << 20
        assert telemetry.jobs >= 3
        assert telemetry.busy_seconds > 0
        device.unload("b")
        with pytest.raises(KeyError):
            device.unload("b")
        device.load(ModelSpec(name="a", path=str(folder)))
    finally:
        device.close()


def test_a_model_that_does_not_load_leaves_the_device_as_it_was(tmp_path) -> None:
    folder = write_tiny("llama", tmp_path)
    device = open_device("cpu:0", DeviceSettings(memory=4096, slab_bytes=4096, threads=1))
    try:
        with pytest.raises(ModelLoadError, match="give the device more memory"):
            device.load(ModelSpec(name="a", path=str(folder)))
        assert device._weights.users == {}
    finally:
        device.close()


def test_closing_gives_back_memory_descriptors_and_thread(tmp_path) -> None:
    folder = write_tiny("llama", tmp_path)

    def cycle() -> None:
        device = open_device("cpu:0", SETTINGS)
        run = Driver(device.load(ModelSpec(name="a", path=str(folder))), Blocks(device.pool.capacity))
        run.step((run.open(prompt_of(10, 1)), 10))
        device.close()
        device.close()

    cycle()
    gc.collect()
    before = descriptors(), mappings(), threading.active_count()
    for _ in range(3):
        cycle()
    gc.collect()
    assert (descriptors(), mappings(), threading.active_count()) == before


def test_memory_needs_no_torch() -> None:
    code = (
        "import sys; import forebay.gpu.memory, forebay.gpu.errors; "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False, env=os.environ).returncode == 0
