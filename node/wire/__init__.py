"""The contract of a daemon, its engine and its carrier: frames, records, shared memory, time logs."""
