"""Stand-ins of the tools by which a Mac tells its posture: shell scripts below a folder, as `Attestor` runs.

`python macs_tools.py FOLDER ARGUMENTS` is `sealring` of a machine that is a Mac to its attestor, with the
tools in FOLDER, and whose nodes renew the keys of their links all the time.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

BOOT = "usr/sbin/system_profiler -json SPiBridgeDataType"
SIP = "usr/bin/csrutil status"
FILEVAULT = "usr/bin/fdesetup status"
ANSWERS = {
    "usr/sbin/sysctl -n hw.model": "Mac16,5",
    "usr/sbin/sysctl -n machdep.cpu.brand_string": "Apple M4 Max",
    "usr/sbin/sysctl -n kern.bootsessionuuid": "4C1F",
    "usr/bin/sw_vers -productVersion": "26.1",
    SIP: "System Integrity Protection status: enabled.",
    "usr/bin/csrutil authenticated-root status": "Authenticated Root status: enabled",
    FILEVAULT: "FileVault is On.",
    BOOT: """{
  "SPiBridgeDataType" : [
    {
      "_name" : "Controller Information",
      "ibridge_boot_uuid" : "A904AC62-589E-450B-8829-96ADA16DE3DC",
      "ibridge_build" : "mBoot-18000.120.36",
      "ibridge_model_identifier_top" : "Mac16,5",
      "ibridge_sb_boot_args" : "Enabled",
      "ibridge_sb_ctrr" : "Enabled",
      "ibridge_sb_device_mdm" : "No",
      "ibridge_sb_manual_mdm" : "No",
      "ibridge_sb_other_kext" : "No",
      "ibridge_sb_sip" : "Enabled",
      "ibridge_sb_ssv" : "Enabled",
      "ibridge_secure_boot" : "Full Security"
    }
  ]
}""",
    "usr/sbin/system_profiler -json SPHardwareDataType": """{
  "SPHardwareDataType" : [ { "_name" : "hardware_overview", "serial_number" : "C02TEST12345" } ]
}""",
}
_SCRIPT = """#!/bin/sh
for word in "$0" "$@"; do name="$name ${word##*/}"; done
folder="${0%/usr/*}/answers/$name"
echo asked >> "$folder/asked"
if [ -e "$folder/once" ]; then . "$folder/once"; fi
exec /bin/cat "$folder/answer"
"""


RENEW_SECONDS = 1.0


class Tools:
    """The tools below a folder; all protections are on, until a command is made to answer something else."""

    def __init__(self, root: Path, answers: dict[str, str] = ANSWERS) -> None:
        self.root = root
        for command, answer in answers.items():
            tool = root / command.split()[0]
            tool.parent.mkdir(parents=True, exist_ok=True)
            tool.write_text(_SCRIPT)
            tool.chmod(0o755)
            self.say(command, answer)

    def say(self, command: str, answer: str) -> None:
        """What a command prints from now on."""
        self._folder(command).mkdir(parents=True, exist_ok=True)
        (self._folder(command) / "answer").write_text(answer)

    def once(self, command: str, script: str) -> None:
        """Lines of shell that the command runs before it answers, the next time alone."""
        file = self._folder(command) / "once"
        file.write_text(f'/bin/rm "$folder/once"\n{script}\n')

    def asked(self, command: str) -> int:
        """How often a command was run."""
        file = self._folder(command) / "asked"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def _folder(self, command: str) -> Path:
        tool, *arguments = command.split()
        return self.root / "answers" / " ".join(["", tool.rpartition("/")[2], *arguments])


def main() -> None:
    folder = Path(sys.argv.pop(1))
    if "node" in sys.argv:
        from sealring.node.daemon import rotation
        from sealring.node.identity import attestor

        rotation.RENEW_SECONDS = rotation.RETRY_SECONDS = RENEW_SECONDS
        mac = partial(attestor.Attestor, system="darwin", root=folder)
        attestor.Attestor = mac  # type: ignore[misc,assignment]
    import hasty

    hasty.main()


if __name__ == "__main__":
    main()
