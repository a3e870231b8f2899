"""The /fs face: an ordinary file system for programs that only know files. Read face.py first."""
