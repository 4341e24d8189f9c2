"""gRPC as all processes use it: servers, mTLS, status, problems, bounds on what comes in."""

from sealring.mesh.system.faces import face

__all__, __getattr__ = face(
    __name__,
    crowd="Crowd",
    holding="Holding Share",
    interceptor="ErrorInterceptor Lease arity stream_lease",
    limits="Buckets grpc_peer_name peer_name",
    pieces="Joiner Outgoing PIECE_BYTES",
    problem="from_parts from_problem to_problem",
    protocol="PROTOCOL_VERSION agree check_release check_speaks own_release software_version",
    protocol12="read_from_12 read_singly rows_ahead_in_12 say_as_12 say_singly",
    reach="Backoff Reach",
    running="RunningCalls",
    server="CHANNEL_OPTIONS INFERENCE JOINING MAX_MESSAGE Server",
    silence="Silence",
    status="from_rpc_error to_status",
    tls=(
        "PeerChannel TlsStore channel_options is_own_cancellation joining_channel "
        "peer_certificate peer_identity secure_channel server_credentials"
    ),
    wire="check_fields",
)
