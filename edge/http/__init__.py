"""The HTTP server of every edge: paths, keys, bodies that are read in bounds, answers and WebSockets."""
