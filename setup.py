"""Adds the bundled models to the wheel, for `sealring demo`; pyproject.toml cannot express this."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

MODELS = ("demo_model", "seeing_model")


class BuildWithModel(build_py):
    """Builds the packages and puts the models beside those of the command; a checkout has them already."""

    def run(self) -> None:
        if not self.editable_mode:
            # An earlier build may have left files that the sources no longer have.
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        if not self.editable_mode:
            for name in MODELS:
                built = Path(self.build_lib, "sealring", "cli", name)
                shutil.copytree(Path("examples", name, "model"), built, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithModel})
