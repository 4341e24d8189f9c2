"""Between a daemon and its children: frames, the data channel, shared memory, notes of times."""
