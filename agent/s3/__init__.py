"""The S3 door: HTTP for S3 clients, over the objects of their tenant (docs/engines/s3.md)."""
