"""The S3 door of an agent of several processes: each serves reads, and the first one all else."""
