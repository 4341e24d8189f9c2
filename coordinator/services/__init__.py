"""The gRPC services: RPCs alone."""
