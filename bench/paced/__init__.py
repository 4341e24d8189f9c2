"""Macs by the clock: the product on engines that take as long as named Macs would (`bench.macs`)."""
