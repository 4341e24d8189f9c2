"""The cluster's certificates and its root metadata."""

from sealring.mesh.system.faces import face

__all__, __getattr__ = face(
    __name__,
    authority="ClusterCA MAX_CSR_BYTES unsigned",
    certificates=(
        "LeafKey MAX_CERTIFICATE_BYTES PeerIdentity ROLES ROOT_EXTENSION Role "
        "TlsMaterial certificate_peer check_issued_by expires_at is_due key_hash load_certificate "
        "renewal_due role_server_name to_pem valid_at"
    ),
    root=(
        "MAX_CHAIN_BYTES MAX_CHAIN_LENGTH MAX_PAYLOAD_BYTES PAYLOAD_TYPE RootMetadata "
        "check_root_times cosign_root decode_chain draft_root encode_chain follow_root "
        "read_root_draft root_fingerprint sign_root verify_root_chain"
    ),
)
