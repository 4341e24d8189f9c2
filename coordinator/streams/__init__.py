"""The streams of nodes, and questions and answers over them."""
