"""The control file of a session: transfers between lent memory and the pool."""
