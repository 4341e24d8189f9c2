"""What coordinator, node, gateway and clients share: roster, handshake, sealing, TLS, errors, logs."""
