"""Which executable to use again: keys, the cache of executables, its budget and its reasons."""
