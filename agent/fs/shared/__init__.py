"""The face of shared files, `/shared`: files of any length in the pool, seen by every agent."""
