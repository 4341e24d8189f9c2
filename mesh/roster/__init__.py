"""The roster: its model, bytes, rules, reader, and the memory against older ones."""

from sealring.mesh.system.faces import face

__all__, __getattr__ = face(
    __name__,
    codec="MAX_PAYLOAD_BYTES PAYLOAD_TYPE complete_roster encode_roster sign_roster",
    difference="roster_update whole_roster",
    memory="RosterMemory RosterStateFile",
    model=(
        "Gateway MAX_RINGS_OF_MEMBER NO_PREVIOUS Revoked Ring RingMember Roster RosterMember "
        "TENSOR ring_min_trust term_of"
    ),
    reader="Equivocation MAX_VERSION_JUMP RosterReader check_roster",
)
