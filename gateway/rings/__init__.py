"""The rings that this gateway schedules: the coordinator's stream, and control streams to the members."""
