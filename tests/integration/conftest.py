"""Fixtures of the integration tests: real processes on loopback.

The tests of a folder share its cluster and leave it as they found it: serving.
"""

import pytest
from ringtest import MODEL, Reference


@pytest.fixture(scope="session")
def reference():
    return Reference(MODEL)
