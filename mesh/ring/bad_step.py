"""The error of a step that does not follow from the state of an epoch."""

from sealring.mesh.errors import InvalidInput


def bad_step(message: str) -> InvalidInput:
    """InvalidInput (BAD_STEP), after which the state is unusable."""
    return InvalidInput(message, reason="BAD_STEP", hint="gateway and members disagree; the epoch must end")
