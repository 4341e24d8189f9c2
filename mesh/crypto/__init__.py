"""Encodings, labels, keys, signed envelopes and link suites."""

from sealring.mesh.system.faces import face

__all__, __getattr__ = face(
    __name__,
    dsse=(
        "Ed25519Signer SignedEnvelope check_threshold encode_envelope key_id parse_envelope "
        "sign_envelope verify_ed25519"
    ),
    encoding=(
        "Fields FormatError canonical_json decode_base32 decode_base64 encode_base32 "
        "encode_base64 pack_fields parse_json_object unpack_fields"
    ),
    identity=(
        "MAX_SIGNATURE_BYTES Signer SoftwareSigner check_member_id encode_public_key "
        "load_public_key member_id private_pem verify verify_ecdsa"
    ),
    keys="KeyType Label TAG_BYTES Uncopyable signing_input",
    spake2="Agreed Exchange Party",
    suites="DEFAULT_SUITES Group InitiatorShare Suite agree_x25519 parse_suites respond_to_share",
)
