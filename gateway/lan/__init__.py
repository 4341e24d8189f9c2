"""The LAN door: HTTPS for phones and laptops of the house, with keys and a certificate of its own."""
