"""The inference interface of every edge, answers on their way to clients, and the segments of their time."""
