"""Who this node is and what it can say about itself."""
