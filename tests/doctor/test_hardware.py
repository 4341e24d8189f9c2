"""Which Mac this is, for bug reports and beside measurements."""

from __future__ import annotations

from doctortest import FakeSystem, recording

from sealring.doctor.hardware import machine

SAYS = {
    "/usr/sbin/sysctl -n hw.model": "Mac16,8\n",
    "/usr/sbin/sysctl -n machdep.cpu.brand_string": "Apple M4 Pro\n",
    "/usr/sbin/sysctl -n hw.perflevel0.physicalcpu": "10\n",
    "/usr/sbin/ioreg": '+-o AGXAcceleratorG16X  <class AGXAcceleratorG16X>\n    "gpu-core-count" = 20\n',
    "/usr/bin/pmset -g batt": "Now drawing from 'Battery Power'\n -InternalBattery-0 (id=1)\t80%;\n",
    "/usr/bin/sw_vers": recording("sw_vers.txt"),
}


def test_what_is_known_is_told_and_nothing_else() -> None:
    assert machine(FakeSystem(SAYS, wheel_tag="py3-none-macosx_26_0_arm64")) == {
        "model": "Mac16,8",
        "chip": "Apple M4 Pro",
        "performance_cores": "10",
        "gpu_cores": "20",
        "memory": str(64 << 30),
        "macos": "26.2",
        "build": "25C56",
        "power": "Battery Power",
        "mlx_wheel": "py3-none-macosx_26_0_arm64",
    }


def test_another_system_is_no_mac() -> None:
    assert machine(FakeSystem(SAYS, platform="linux")) == {}


def test_the_tag_of_a_wheel_is_read_where_it_was_installed() -> None:
    from sealring.doctor.system import System

    assert "none" in System().wheel_tag("mlx-cpu") or System().wheel_tag("mlx-metal")
    assert System().wheel_tag("no-such-package") == ""
