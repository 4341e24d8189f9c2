"""`sealring dashboard`: the cluster in a browser, and a chat whose prompts are sealed on this machine."""
