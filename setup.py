"""Adds the bundled demo model to the wheel, for `sealring demo`; pyproject.toml cannot express this."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

MODEL = "examples/demo_model/model"


class BuildWithModel(build_py):
    """Builds the packages and puts the model beside those of the command; a checkout has it already."""

    def run(self) -> None:
        if not self.editable_mode:
            # An earlier build may have left files that the sources no longer have.
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        if not self.editable_mode:
            shutil.copytree(MODEL, Path(self.build_lib, "sealring", "cli", "demo_model"), dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithModel})
