"""Inspection of stores from outside: their objects, who holds them, and whether the tables are sound.

It changes nothing and makes no process wait. `find_segments` lists the stores of this host, and `StoreInspector` reads
one store, alive or dead; both return frozen records. `verify` checks a store. The `shmstore` command prints all of it.
"""
