"""The FUSE protocol: layouts, names, requests, replies, and the session that answers them."""
