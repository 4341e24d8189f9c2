"""sealring: the public contract (`sealring.v1`) and the client library."""

import os

# gRPC's handlers of fork() reset its poller in the middle of other threads' calls, and can leave the process
# hanging for good. Python forks for each child on macOS, and not on Linux (it has vfork there). gRPC reads
# this when it is imported, so it is set where no import of ours can come before it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
