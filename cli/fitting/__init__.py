"""What runs on which Macs: models that people run, the memory and speed of Macs, and plans over both."""
