"""Admission to the gateway's edges: API keys, their scopes, and limits that are checked before any hash."""
