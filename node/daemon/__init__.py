"""The node daemon: its session, its epochs and the child processes that it watches."""
