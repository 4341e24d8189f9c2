from sealring.node import scratch

scratch.claim()  # before anything here imports mlx
