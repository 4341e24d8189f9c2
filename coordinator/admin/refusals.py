"""Refusals that several nouns of the Admin service share."""

from __future__ import annotations

from sealring.mesh.crypto.identity import check_member_id
from sealring.mesh.errors import InvalidInput


def member_id(identifier: str) -> str:
    """Raises InvalidInput (BAD_MEMBER_ID) that names the field `id`."""
    try:
        return check_member_id(identifier)
    except InvalidInput as error:
        error.metadata["param"] = "id"
        raise


def bad(param: str, message: str, reason: str) -> InvalidInput:
    """The refusal of one field of a request."""
    return InvalidInput(message, reason=reason, param=param)
