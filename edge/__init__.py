"""Servers for clients, in front of whatever answers prompts: a gateway, the proxy or the dashboard."""
