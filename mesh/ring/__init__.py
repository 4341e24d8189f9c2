"""State that members and gateways of a ring derive alike: rows in lanes, prefixes, routing by prefix."""
