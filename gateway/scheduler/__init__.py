"""Which rows are admitted, evicted and stepped, and when: pure state machines without clocks or I/O."""
