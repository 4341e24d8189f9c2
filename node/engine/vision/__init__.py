"""Images of a prompt: from files to the arrays that a vision tower takes, at a ring's head."""
