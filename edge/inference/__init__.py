"""The inference interface of every edge, and answers on their way to clients."""
