"""What members and gateways of a ring derive alike: which rows are where, prefixes, routing by them."""
