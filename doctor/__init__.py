"""What `sealring doctor` looks at: one subject a file, readers of the system in `system`, parsers pure."""
