"""Who may use the gateway's edges: API keys, their scopes, and limits that come before any costly check."""
