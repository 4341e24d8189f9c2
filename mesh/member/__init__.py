"""What an enrolled machine does and keeps: joining, its state, its proofs, roster and certificate."""

from sealring.mesh.system.faces import face

__all__, __getattr__ = face(
    __name__,
    bootstrap="JoinToken MAX_TOKEN_CHARACTERS claimed_root fetch_root verify_coordinator_leaf",
    certificate_keeper="CertificateKeeper",
    client="ClientKeeper",
    coordinators="Coordinators",
    discovery="MAX_HEARD SERVICE find_clusters hear_of_coordinator",
    enrolment="Enrolled NodeEvidence enrol join_content",
    introduction="Introduction",
    joincode="Offer begin make_code open_token parse_code seal_token short_hash show_code token_for",
    proof=(
        "CalledProof CallerProof Connection Credentials HeldRoster Purpose SignProof "
        "by_identity by_roster_keys check_proof of_coordinator of_identity refusal transcript"
    ),
    renewal="renew_by_identity renewal_content",
    roster_keeper="RosterKeeper removed",
    state=(
        "IDENTITY_KEY MachineState ROSTER ROSTER_STATE check_may_join forget_enrolment "
        "load_machine_state parse_pem_leaf save_machine_state save_tls"
    ),
    tenure="Tenure",
)
