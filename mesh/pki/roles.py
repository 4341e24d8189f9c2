"""The roles of joining machines, by their numbers in the protocol."""

from __future__ import annotations

from sealring.mesh.pki.certificates import Role
from sealring.v1 import membership_pb2

PROTO_ROLES = {Role.MEMBER: membership_pb2.ROLE_NODE, Role.GATEWAY: membership_pb2.ROLE_GATEWAY}
ROLES: dict[int, Role] = {number: role for role, number in PROTO_ROLES.items()}
