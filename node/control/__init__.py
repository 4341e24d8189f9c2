"""The Control service: a gateway's steps to the engine, the engine's answers back."""
