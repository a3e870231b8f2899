"""The way of a put, a delete and a pin, and what makes room for them."""
