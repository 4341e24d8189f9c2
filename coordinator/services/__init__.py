"""The gRPC services, and what they do beyond answering."""
