"""Trust levels and the evidence for them: attestation statements, Apple's device attestation."""
