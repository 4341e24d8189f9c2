"""For every test: no example of hypothesis fails because the machine was slow."""

from hypothesis import settings

settings.register_profile("sealring", deadline=None)
settings.load_profile("sealring")
