"""`g35 replay`: a KV-cache trace played through the mount as an engine would play it."""
