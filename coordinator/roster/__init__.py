"""What the store says becomes a signed roster; the audit log's head is signed as well."""
