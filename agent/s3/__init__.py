"""The S3 door: an HTTP listener where S3-shaped clients find what is their tenant's (docs/engines/s3.md)."""
