"""The commands, one module per group. They import heavy things inside their functions."""
