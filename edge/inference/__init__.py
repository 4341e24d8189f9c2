"""What answers prompts, an answer on its way to the client, and where its time goes."""
