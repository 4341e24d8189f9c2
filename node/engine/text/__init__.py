"""The head's text side: prompts to tokens, tokens to text."""
