from httpedge import backend, calling, port

__all__ = ["backend", "calling", "port"]
