"""The pool map: its document, its copies on every namespace, how they agree and change."""
