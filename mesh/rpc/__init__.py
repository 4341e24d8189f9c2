"""gRPC as all processes use it: servers, mTLS, status, problems, bounds on what comes in."""
