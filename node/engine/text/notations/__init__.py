"""How models write tool calls: each notation once, and its reader."""
