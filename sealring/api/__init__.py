"""The APIs that clients speak, as pure translation: bodies to `GenerateRequest`, answers to bytes.

No I/O. The gateway uses it for prompts in clear, `sealring proxy` and the client library for sealed ones.
"""
