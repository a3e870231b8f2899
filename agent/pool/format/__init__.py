"""What lies on flash: directories, slots, and what is remembered of them."""
