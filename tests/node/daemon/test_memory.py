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
