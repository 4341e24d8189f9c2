"""Which members hold which layers of a model."""
