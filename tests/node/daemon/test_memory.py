from sealring.node.daemon.memory import USABLE_SHARE, MemoryMeter


def test_the_lowest_limit_counts() -> None:
    meter = MemoryMeter(None)
    report = meter.measure()
    assert report.usable == int(report.total * USABLE_SHARE)
    assert report.load >= 0
    meter.set_device_limit(1 << 30)
    assert meter.usable == 1 << 30
    meter.set_device_limit(0)
    assert meter.usable == report.usable
    configured = MemoryMeter(1 << 28)
    configured.set_device_limit(1 << 30)
    assert configured.usable == 1 << 28
