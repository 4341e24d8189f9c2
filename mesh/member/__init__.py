"""What an enrolled machine does and keeps: joining, its state, its proofs, roster and certificate."""
