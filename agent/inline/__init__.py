"""What happens to a block between the wire and the GPU host: sealing, opening, and the keys for both."""
