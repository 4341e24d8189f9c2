from sealring.node.daemon.memory import USABLE_SHARE, MemoryMeter


def test_the_lowest_limit_counts() -> None:
    meter = MemoryMeter(None)
    by_default = meter.usable
    assert by_default == int(meter.total * USABLE_SHARE)
    meter.set_device_limit(1 << 30, 5)
    assert (meter.usable, meter.overhead) == (1 << 30, 5)
    meter.set_device_limit(0, 5)
    assert meter.usable == by_default
    configured = MemoryMeter(1 << 28)
    configured.set_device_limit(1 << 30, 5)
    assert configured.usable == 1 << 28


def test_an_owner_who_lets_the_gpu_wire_more_gets_more() -> None:
    """`sysctl iogpu.wired_limit_mb` raises what Metal reports; macOS itself keeps some all the same."""
    meter = MemoryMeter(None)
    meter.total = 512 << 30
    meter.set_device_limit(int(meter.total * 0.9), 0)
    assert meter.usable == int(meter.total * 0.9)
    meter.set_device_limit(meter.total, 0)
    assert USABLE_SHARE * meter.total < meter.usable < meter.total
    meter.total = 8 << 30
    meter.set_device_limit(int(meter.total * 0.9), 0)
    assert meter.usable == int(meter.total * USABLE_SHARE), "of a small one the system needs a quarter"
