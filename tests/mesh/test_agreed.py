"""Numbers that machines of one cluster have to agree on: whoever changes one changes the protocol."""

from __future__ import annotations

from types import ModuleType

import pytest

from sealring.mesh import clock
from sealring.mesh.crypto import dsse, encoding, identity, suites
from sealring.mesh.member import bootstrap, proof
from sealring.mesh.pki import authority, certificates, root
from sealring.mesh.prompt import (
    composition,
    deployment_limits,
    prefix_names,
    routing,
    sealed,
    tools,
    validate,
)
from sealring.mesh.roster import codec, model, reader
from sealring.mesh.rpc import problem, protocol, server, traces, wire
from sealring.mesh.trust import apple, attestation

DAY = 24 * 3600


@pytest.mark.parametrize(
    ("module", "numbers"),
    [
        (clock, {"SKEW_SECONDS": 60}),
        (dsse, {"KEY_BYTES": 32, "SIGNATURE_BYTES": 64, "_MAX_SIGNATURES": 32}),
        (encoding, {"MAX_INTEGER": 2**63 - 1, "_MAX_DEPTH": 16}),
        (identity, {"PUBLIC_KEY_BYTES": 65}),
        (suites, {"KEY_BYTES": 32, "NONCE_BYTES": 12, "TAG_BYTES": 16}),
        (proof, {"NONCE_BYTES": 32, "_MAX_PROOF_BYTES": 16 << 10, "_MAX_TRANSCRIPT_BYTES": 2048}),
        (certificates, {"MAX_CERTIFICATE_BYTES": 1 << 17}),
        (
            authority,
            {
                "MAX_CSR_BYTES": 4096,
                "_MAX_LIFETIME_SECONDS": 30 * DAY,
                "_CA_LIFETIME_SECONDS": 3650 * DAY,
            },
        ),
        (
            root,
            {
                "SPEC_VERSION": 1,
                "MAX_PAYLOAD_BYTES": 32 << 10,
                "MAX_CHAIN_LENGTH": 16,
                "MAX_CHAIN_BYTES": 64 << 10,
                "_MAX_KEYS": 16,
                "_MAX_AUTHORITIES": 4,
                "_MAX_CERTIFICATE_BYTES": 4096,
            },
        ),
        (
            composition,
            {
                "MAX_LANES": 512,
                "MAX_CHUNKS": 64,
                "MAX_PARAMS_BYTES": 1 << 20,
                "MAX_PREFIXES": 1024,
                "MAX_CHOICES": 8,
                "MAX_CHANGES": 8192,
                "MAX_DRAFTS": 15,
                "MAX_UNSETTLED": 128,
            },
        ),
        (
            deployment_limits,
            {
                "MAX_CONTEXT": 1 << 24,
                "MAX_LAYERS": 1024,
                "MAX_PREFILL_CHUNK": 8192,
                "MAX_REPLICAS": 1000,
                "MAX_ROWS": 256,
                "MAX_STAGES": 256,
            },
        ),
        (
            prefix_names,
            {"BLOCK": 64, "NAME_BYTES": 16, "KEY_BYTES": 32, "MAX_SCOPE_BYTES": 512, "MAX_SALT_BYTES": 64},
        ),
        (routing, {"SECRET_BYTES": 32, "SHORTEST": 256, "MOST_LEEWAY": 4, "_KEY_BYTES": 8, "_MESSAGES": 8}),
        (
            sealed,
            {
                "REQUEST_ID_BYTES": 16,
                "MAX_REQUEST_BYTES": 8 << 20,
                "MAX_CHUNK_BYTES": 1 << 20,
                "MAX_LIFETIME_SECONDS": 300,
            },
        ),
        (
            validate,
            {
                "MAX_MESSAGES": 4096,
                "MAX_CONTENT_BYTES": 4 << 20,
                "MAX_STOPS": 16,
                "MAX_STOP_CHARACTERS": 256,
                "MAX_DRAFT_TOKENS": 256,
                "MAX_TOP_K": 1 << 20,
                "MAX_REPETITION_CONTEXT_SIZE": 4096,
                "MAX_LOGIT_BIASES": 300,
                "MAX_TOKEN_ID": 2**31 - 1,
                "MAX_LOGPROBS": 20,
                "MAX_SCORED": 1 << 14,
                "MAX_TOKENS": 2**31 - 1,
                "MAX_ENVELOPE_BYTES": 8 << 20,
                "MAX_PRIORITY": 10,
                "MAX_DEADLINE_MS": DAY * 1000,
                "MAX_PROMPT_CACHE_KEY": 256,
            },
        ),
        (
            codec,
            {
                "SPEC_VERSION": 1,
                "MAX_MEMBERS": 1000,
                "MAX_RINGS": 1000,
                "MAX_COORDINATORS": 2,
                "BYTES_PER_HUNDRED": 64 << 10,
                "HASH_BYTES": 32,
                "SEALING_KEY_SIZES": (32, 1216),
                "_MAX_ADDRESSES": 8,
                "_MAX_LAYERS": 10_000,
                "_MAX_CONTEXT": 1 << 24,
            },
        ),
        (
            model,
            {
                "MAX_LIFETIME_SECONDS": 900,
                "NO_PREVIOUS": bytes(32),
                "MAX_RINGS_OF_MEMBER": 8,
                "TERM_BITS": 32,
            },
        ),
        (
            bootstrap,
            {
                "TOKEN_ID_BYTES": 10,
                "TOKEN_SECRET_BYTES": 32,
                "MAX_TOKEN_ADDRESSES": 4,
                "MAX_TOKEN_CHARACTERS": 614,
            },
        ),
        (
            attestation,
            {
                "STATEMENT_VERSION": 1,
                "MAX_STATEMENT_BYTES": 8192,
                "NONCE_BYTES": 32,
                "MAX_AGE_SECONDS": 120,
                "MAX_MODELS": 8,
                "_MAX_TEXT": 128,
            },
        ),
        (apple, {"MAX_CHAIN": 4, "MAX_CERTIFICATE_BYTES": 4096}),
        (reader, {"MAX_VERSION_JUMP": 1 << 40}),
        (
            tools,
            {
                "MAX_TOOLS": 128,
                "MAX_CALLS": 128,
                "MAX_JSON_BYTES": 1 << 20,
                "MAX_SCHEMA_BYTES": 64 << 10,
                "MAX_JSON_DEPTH": 32,
            },
        ),
        (problem, {"MAX_MESSAGE": 1200, "MAX_METADATA": 24, "MAX_VALUE": 80}),
        (protocol, {"PROTOCOL_VERSION": 6, "OLDEST_PROTOCOL": 6}),
        (server, {"MAX_MESSAGE": 16 << 20}),
        (traces, {"MAX_SPANS": 32_768}),
        (wire, {"MAX_FIELDS": 1 << 14}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, ModuleType) else "",
)
def test_a_number_is_what_it_was(module: ModuleType, numbers: dict[str, object]) -> None:
    assert {name: getattr(module, name) for name in numbers} == numbers


def test_ports_are_as_wide_as_they_were() -> None:
    plain = server.Port()
    assert (plain.connections, plain.streams, plain.counting) == (2048, 32, False)
    joining, asking = server.JOINING, server.INFERENCE
    assert (joining.connections, joining.streams, joining.message, joining.counting) == (
        256,
        4,
        1 << 18,
        True,
    )
    assert (asking.connections, asking.streams, asking.counting) == (4096, 256, True)
    assert asking.message == validate.MAX_ENVELOPE_BYTES + (1 << 16)


def test_connections_are_kept_and_bounded_as_they_were() -> None:
    """How often who pings is part of what the other end bears."""
    pings = {
        "grpc.keepalive_time_ms": 2000,
        "grpc.keepalive_timeout_ms": 2000,
        "grpc.http2.ping_timeout_ms": 2000,
    }
    assert dict(server.SERVER_OPTIONS) == {
        **pings,
        "grpc.max_send_message_length": 16 << 20,
        "grpc.so_reuseport": 0,
        "grpc.server_handshake_timeout_ms": 10_000,
        "grpc.http2.settings_timeout": 10_000,
        "grpc.max_metadata_size": 2048,
        "grpc.absolute_max_metadata_size": 4096,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.min_ping_interval_without_data_ms": 500,
        "grpc.http2.max_ping_strikes": 8,
    }
    assert dict(server.CHANNEL_OPTIONS) == {
        **pings,
        "grpc.max_receive_message_length": 16 << 20,
        "grpc.max_send_message_length": 16 << 20,
        "grpc.http2.max_pings_without_data": 0,
        "grpc.keepalive_permit_without_calls": 0,
        "grpc.use_local_subchannel_pool": 1,
        "grpc.initial_reconnect_backoff_ms": 200,
        "grpc.max_reconnect_backoff_ms": 5000,
    }
