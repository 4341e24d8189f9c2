"""What pyproject.toml cannot say: the wheel has the bundled demo model, so that `sealring demo` finds it."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

MODEL = "examples/demo_model/model"


class BuildWithModel(build_py):
    """Packages, and the model beside the command line's; in a checkout it is found where it lies."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(
                self.build_lib, ignore_errors=True
            )  # what an earlier build left, of files that are gone
        super().run()
        if not self.editable_mode:
            shutil.copytree(MODEL, Path(self.build_lib, "sealring", "cli", "demo_model"), dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithModel})
