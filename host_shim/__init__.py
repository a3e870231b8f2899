"""What enters the GPU host's interpreter: a client for the mount, standard library only."""
